/* Gradients per record, written out as rows: their squared lengths, and their sums by weights, for many tensors at once.

   Tensor k has `records` rows of widths[k] numbers, one after the other. */

#include "processors.h"

/* So many columns of a total stay in the nearest cache while the rows go by, four at a time. */
#define COLUMNS 2048
#define LANES 16

FOR_EACH_PROCESSOR
static double squared_length(const float *row, int64_t width) {
    double sums[LANES] = {0}, total = 0;
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)row[k + lane] * row[k + lane];
    for (; k < width; k++)
        total += (double)row[k] * row[k];
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

/* The squared length of every row, [tensors,records]. */
void clipless_squared_lengths(const float *const *rows, const int64_t *widths, int64_t tensors, int64_t records,
                              float *lengths, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t k = 0; k < tensors * records; k++) {
        int64_t tensor = k / records, width = widths[tensor];
        lengths[k] = (float)squared_length(rows[tensor] + k % records * width, width);
    }
}

FOR_EACH_PROCESSOR
static void add_columns(float *restrict total, const float *restrict rows, const float *restrict factors, int64_t records,
                        int64_t width, int64_t keeps, int64_t column, int64_t end) {
    for (; column < end; column += COLUMNS) {
        int64_t columns = end - column < COLUMNS ? end - column : COLUMNS, row = 0;
        float *restrict sum = total + column;
        const float *restrict a = rows + column;
        if (!keeps)
            memset(sum, 0, columns * sizeof *sum);
        for (; row + 4 <= records; row += 4, a += 4 * width) {
            const float *restrict b = a + width, *restrict c = b + width, *restrict d = c + width;
            float fa = factors[row], fb = factors[row + 1], fc = factors[row + 2], fd = factors[row + 3];
            for (int64_t k = 0; k < columns; k++)
                sum[k] += (fa * a[k] + fb * b[k]) + (fc * c[k] + fd * d[k]);
        }
        for (; row < records; row++, a += width) {
            float factor = factors[row];
            for (int64_t k = 0; k < columns; k++)
                sum[k] += factor * a[k];
        }
    }
}

/* total [width] plus, or if it is not kept instead of it, the sum of the rows times their factors [records]. Every thread
   has an equal share of the columns of all tensors. */
void clipless_add_rows(float *const *totals, const float *const *rows, const float *const *factors, const int64_t *widths,
                       const int64_t *keeps, int64_t tensors, int64_t records, int64_t threads) {
    int64_t all = 0;
    for (int64_t k = 0; k < tensors; k++)
        all += widths[k];
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t from = all * thread / threads, to = all * (thread + 1) / threads, start = 0;
        for (int64_t k = 0; k < tensors; start += widths[k++]) {
            int64_t column = from > start ? from - start : 0, end = to - start < widths[k] ? to - start : widths[k];
            if (column < end)
                add_columns(totals[k], rows[k], factors[k], records, widths[k], keeps[k], column, end);
        }
    }
}
