/* A tile of a matrix product, small enough that its sums stay in registers. */

#include "processors.h"
#include <stddef.h>

/* Into every processor's own machine code. */
#define INLINE __attribute__((always_inline)) static inline
/* So many columns and rows. */
#define LANES 16
#define ROWS 8

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

/* made [count,columns] = Σ_t left[row,t] · right[t,column], added to what is there unless it is the `first` part. Number t of
   row r of `left` lies at r·step + t·apart, row t of `right` at t·stride, and LANES of its numbers can be read; rows of
   `made` are `width` apart. */
INLINE void multiply(const float *restrict left, int64_t step, int64_t apart, const float *restrict right, int64_t stride,
                     int64_t terms, float *restrict made, int64_t width, int64_t columns, int count, int first) {
    lanes sums[ROWS] = {0};
    const float *rows[ROWS];
    for (int row = 0; row < ROWS; row++)
        rows[row] = left + (row < count ? row : 0) * step;
    for (int64_t t = 0; t < terms; t++) {
        lanes numbers = *(const lanes *)(right + t * stride);
        for (int row = 0; row < ROWS; row++)
            sums[row] += rows[row][t * apart] * numbers;
    }
    for (int row = 0; row < count; row++, made += width)
        if (columns == LANES)
            *(lanes *)made = first ? sums[row] : *(lanes *)made + sums[row];
        else
            for (int64_t k = 0; k < columns; k++)
                made[k] = first ? sums[row][k] : made[k] + sums[row][k];
}
