/* A tile of a matrix product, small enough that its sums stay in registers. */

#include "lanes.h"

/* So many rows, and up to PANEL columns. */
#define ROWS 8
#define PANEL (2 * LANES)

/* Which terms are added up, `count` of them in each of some runs: how far apart those of a row of the left factor lie, and the
   rows of the right factor, and what the runs have. They are added in this order, whatever the tile. */
struct terms {
    int64_t count, left, right, runs, left_run, right_run;
};

#define VECTOR lanes_512
#define TALL ROWS
#define ACROSS 3
#define BY(name) name##_by_512
#include "sums.h"

#define VECTOR lanes_256
#define TALL (ROWS / 2)
#define ACROSS 2
#define BY(name) name##_by_256
#include "sums.h"

#define VECTOR lanes_128
#define TALL (ROWS / 4)
#define ACROSS 4
#define BY(name) name##_by_128
#include "sums.h"

/* The same as `product` for LANES columns at most, which begin at one place, in registers of 256 or 128 bits. */
INLINE void narrow_product(const float *restrict left, int64_t step, const float *restrict right,
                           const struct terms *restrict terms, float *restrict made, int64_t width, int64_t columns, int count,
                           int first) {
    static const int64_t halves[] = {0, 8}, quarters[] = {0, 4, 8, 12};
    if (REGISTER_BITS == 256)
        for (int row = 0; row < count; row += ROWS / 2)
            product_by_256(2, left + row * step, step, right, halves, terms, made + row * width, width, columns, count - row,
                           first);
    else
        for (int row = 0; row < count; row += ROWS / 4)
            product_by_128(4, left + row * step, step, right, quarters, terms, made + row * width, width, columns,
                           count - row, first);
}

/* made [count,columns] = Σ_t left[row,t] · right[t,column], added to what is there unless it is the `first` part; of more
   columns the first PANEL. Number t of row r of `left` lies at r·step + t·apart, row t of `right` at t·stride, of which LANES
   can be read for each that is begun; rows of `made` are `width` apart. */
INLINE void multiply(const float *restrict left, int64_t step, int64_t apart, const float *restrict right, int64_t stride,
                     int64_t many, float *restrict made, int64_t width, int64_t columns, int count, int first) {
    static const int64_t places[] = {0, LANES};
    const struct terms terms = {many, apart, stride, 1, 0, 0};
    if (REGISTER_BITS < 512)
        for (int64_t column = 0; column < columns && column < PANEL; column += LANES)
            narrow_product(left, step, right + column, &terms, made + column, width, columns - column, count, first);
    else if (columns > LANES)
        product_by_512(2, left, step, right, places, &terms, made, width, columns, count, first);
    else
        product_by_512(1, left, step, right, places, &terms, made, width, columns, count, first);
}
