/* Weighted sums of outer products, for many small layers at once: total [o,i] = Σ_b factors[b] · left[b,o] · right[b,i]. */

#include "tile.h"

/* Records are added up in runs, and the runs in the total, so that rounding errors stay small for many records. */
#define RUN 64

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
