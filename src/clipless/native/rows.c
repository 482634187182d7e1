/* Gradients per record, written out as rows or as outer products of rows: their squared lengths, and their sums by weights,
   for many tensors at once.

   Tensor k has `records` rows of widths[k] numbers, one after the other. */

#include "tile.h"

/* So many columns of a total stay in the nearest cache while the rows go by, four at a time. */
#define COLUMNS 2048
#define CHAINS 64
/* So many squares are added up in float, 16 in each lane, and the rest in double. */
#define SQUARES 1024
/* Squares below this lose digits to underflow. */
#define UNDERFLOW 1e-30
/* Rows are added up in runs, and the runs in the total, so that rounding errors stay small for many records. */
#define RUN 64

FOR_EACH_PROCESSOR
static double squared_length(const float *row, int64_t width) {
    double total = 0;
    int64_t k = 0;
    while (k + CHAINS <= width) {
        float sums[CHAINS] = {0};
        int64_t end = width - k < SQUARES ? width - CHAINS : k + SQUARES - CHAINS;
        for (; k <= end; k += CHAINS)
            for (int lane = 0; lane < CHAINS; lane++)
                sums[lane] += row[k + lane] * row[k + lane];
        for (int half = CHAINS / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++)
                sums[lane] += sums[lane + half];
        total += sums[0];
    }
    for (; k < width; k++)
        total += (double)row[k] * row[k];
    if (total >= width * UNDERFLOW && total <= FLT_MAX)
        return total;
    total = 0;
    for (k = 0; k < width; k++)
        total += (double)row[k] * row[k];
    return total;
}

/* The squared length of every row, [tensors,records]. */
void clipless_squared_lengths(const float *const *rows, const int64_t *widths, int64_t tensors, int64_t records,
                              double *lengths, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t k = 0; k < tensors * records; k++) {
        int64_t tensor = k / records, width = widths[tensor];
        lengths[k] = squared_length(rows[tensor] + k % records * width, width);
    }
}

/* sum [columns] plus the rows times their factors. */
static inline void add_run(float *restrict sum, const float *restrict a, const float *restrict factors, int64_t records,
                           int64_t width, int64_t columns) {
    int64_t row = 0;
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

FOR_EACH_PROCESSOR
static void add_columns(float *restrict total, const float *restrict rows, const float *restrict factors, int64_t records,
                        int64_t width, int64_t keeps, int64_t column, int64_t end) {
    float run[COLUMNS];
    for (; column < end; column += COLUMNS) {
        int64_t columns = end - column < COLUMNS ? end - column : COLUMNS;
        float *restrict sum = total + column;
        if (!keeps)
            memset(sum, 0, columns * sizeof *sum);
        if (records <= RUN) {
            add_run(sum, rows + column, factors, records, width, columns);
            continue;
        }
        for (int64_t row = 0; row < records; row += RUN) {
            memset(run, 0, columns * sizeof *run);
            add_run(run, rows + column + row * width, factors + row, records - row < RUN ? records - row : RUN, width,
                    columns);
            for (int64_t k = 0; k < columns; k++)
                sum[k] += run[k];
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

/* The last columns of a run, with room to read LANES of them. */
INLINE const float *last_columns(const float *restrict right, int64_t records, int64_t width, int64_t columns,
                                 float *restrict room) {
    memset(room, 0, records * LANES * sizeof *room);
    for (int64_t b = 0; b < records; b++)
        memcpy(room + b * LANES, right + b * width, columns * sizeof *room);
    return room;
}

FOR_EACH_PROCESSOR
static void add_product(float *restrict total, const float *restrict left, const float *restrict right,
                        const float *restrict factors, int64_t outputs, int64_t width, int64_t records, int64_t keeps) {
    float room[RUN * LANES];
    if (!keeps)
        memset(total, 0, outputs * width * sizeof *total);
    for (int64_t run = 0; run < records; run += RUN) {
        int64_t count = records - run < RUN ? records - run : RUN;
        for (int64_t k = 0; k < width; k += LANES) {
            int64_t columns = width - k < LANES ? width - k : LANES, stride = columns < LANES ? LANES : width;
            const float *some = right + run * width + k;
            if (columns < LANES)
                some = last_columns(some, count, width, columns, room);
            for (int64_t o = 0; o < outputs; o += ROWS)
                multiply(left + run * outputs + o, 1, outputs, factors + run, some, stride, count, total + o * width + k,
                         width, columns, outputs - o < ROWS ? outputs - o : ROWS, 0);
        }
    }
}

/* Sum k has outputs[k] rows of widths[k] numbers; what is there is kept, or not. */
void clipless_add_products(float *const *totals, const float *const *lefts, const float *const *rights,
                           const float *const *factors, const int64_t *outputs, const int64_t *widths, const int64_t *keeps,
                           int64_t sums, int64_t records) {
    for (int64_t k = 0; k < sums; k++)
        add_product(totals[k], lefts[k], rights[k], factors[k], outputs[k], widths[k], records, keeps[k]);
}
