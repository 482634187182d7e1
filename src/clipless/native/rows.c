/* Gradients per record, written out as rows: their squared lengths, what these add up to, and their sums by weights, for many
   tensors at once.

   A tensor has `records` rows, one after the other. What a function takes of each is a structure of words of 64 bits. */

#include "lengths.h"

/* So many columns of a total stay in the nearest cache while the rows go by, four at a time. */
#define COLUMNS 2048
/* Rows are added up in runs, and the runs in the total, so that rounding errors stay small for many records. */
#define RUN 64

FOR_EACH_PROCESSOR
static void lengths_of(const float *restrict rows, int64_t width, int64_t records, double *restrict lengths) {
    for (int64_t b = 0; b < records; b++)
        lengths[b] = squared_length(rows + b * width, width);
}

struct rows {
    const float *rows;
    int64_t width;
};

/* squares [groups,records], the sum of the group's terms: the squared length of the row of one tensor, times that of another
   unless its number is negative. `lengths` is room for [tensors,records]. Every thread has an equal share of the rows of all
   tensors. */
void clipless_squares(const struct rows *given, int64_t tensors, double *lengths, const int64_t *terms, int64_t count,
                      double *squares, int64_t groups, int64_t records, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t from = tensors * records * thread / threads, to = tensors * records * (thread + 1) / threads;
        for (int64_t k = 0; k < tensors; k++) {
            int64_t row = from > k * records ? from - k * records : 0;
            int64_t end = to - k * records < records ? to - k * records : records;
            if (row < end)
                lengths_of(given[k].rows + row * given[k].width, given[k].width, end - row, lengths + k * records + row);
        }
    }
    memset(squares, 0, groups * records * sizeof *squares);
    for (int64_t k = 0; k < count; k++, terms += 3) {
        double *restrict sum = squares + terms[0] * records;
        const double *one = lengths + terms[1] * records, *other = lengths + (terms[2] < 0 ? 0 : terms[2]) * records;
        for (int64_t b = 0; b < records; b++)
            sum[b] += terms[2] < 0 ? one[b] : one[b] * other[b];
    }
}

/* Norms times a scale, from their squares: infinite if not finite, zero if not above `least`. Whether there is any such norm
   is left in `unusual`. */
void clipless_norms(const double *squares, float *norms, int64_t count, double scale, double least, int64_t *unusual) {
    int64_t found = 0;
    for (int64_t k = 0; k < count; k++) {
        float norm = sqrtf((float)squares[k]);
        int counts = norm > (float)least && norm <= FLT_MAX;
        found |= !counts;
        norms[k] = counts ? norm * (float)scale : norm <= (float)least ? 0 : INFINITY;
    }
    *unusual = found;
}

/* sum [columns] plus the rows times their factors times the scale. */
static inline void add_run(float *restrict sum, const float *restrict a, const float *restrict factors, float scale,
                           int64_t records, int64_t width, int64_t columns) {
    int64_t row = 0;
    for (; row + 4 <= records; row += 4, a += 4 * width) {
        const float *restrict b = a + width, *restrict c = b + width, *restrict d = c + width;
        float fa = factors[row] * scale, fb = factors[row + 1] * scale;
        float fc = factors[row + 2] * scale, fd = factors[row + 3] * scale;
        for (int64_t k = 0; k < columns; k++)
            sum[k] += (fa * a[k] + fb * b[k]) + (fc * c[k] + fd * d[k]);
    }
    for (; row < records; row++, a += width) {
        float factor = factors[row] * scale;
        for (int64_t k = 0; k < columns; k++)
            sum[k] += factor * a[k];
    }
}

FOR_EACH_PROCESSOR
static void add_columns(float *restrict total, const float *restrict rows, const float *restrict factors, float scale,
                        int64_t records, int64_t width, int64_t keeps, int64_t column, int64_t end) {
    float run[COLUMNS];
    for (; column < end; column += COLUMNS) {
        int64_t columns = end - column < COLUMNS ? end - column : COLUMNS;
        float *restrict sum = total + column;
        if (!keeps)
            memset(sum, 0, columns * sizeof *sum);
        if (records <= RUN) {
            add_run(sum, rows + column, factors, scale, records, width, columns);
            continue;
        }
        for (int64_t row = 0; row < records; row += RUN) {
            memset(run, 0, columns * sizeof *run);
            add_run(run, rows + column + row * width, factors + row, scale, records - row < RUN ? records - row : RUN,
                    width, columns);
            for (int64_t k = 0; k < columns; k++)
                sum[k] += run[k];
        }
    }
}

struct weighted {
    float *total;
    const float *rows, *factors;
    int64_t width, keeps;
};

/* total [width] plus, or if it is not kept instead of it, the sum of the rows times their factors [records] times the scale.
   Every thread has an equal share of the columns of all tensors. */
void clipless_add_rows(const struct weighted *sums, int64_t tensors, double scale, int64_t records, int64_t threads) {
    int64_t all = 0;
    for (int64_t k = 0; k < tensors; k++)
        all += sums[k].width;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t from = all * thread / threads, to = all * (thread + 1) / threads, start = 0;
        for (const struct weighted *sum = sums; sum < sums + tensors; start += sum++->width) {
            int64_t column = from > start ? from - start : 0, end = to - start < sum->width ? to - start : sum->width;
            if (column < end)
                add_columns(sum->total, sum->rows, sum->factors, (float)scale, records, sum->width, sum->keeps, column,
                            end);
        }
    }
}
