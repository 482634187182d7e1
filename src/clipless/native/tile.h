/* A tile of a matrix product, small enough that its sums stay in registers. */

#include "lanes.h"

/* So many rows, and LANES columns. */
#define ROWS 8

/* So many vectors of columns at a time keep both units of a processor with 32 wide registers busy. */
#define WIDE 2

/* Whether this is such a processor. */
INLINE int has_wide_registers(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx512f");
#else
    return 0;
#endif
}

/* made [count,columns] = Σ_t left[row,t] · right[t,column], added to what is there unless it is the `first` part, for at most
   `vectors` times LANES columns. Number t of row r of `left` lies at r·step + t·apart, row t of `right` at t·stride, and that
   many of its numbers can be read; rows of `made` are `width` apart. Terms are added in the order of t, whatever the tile. */
INLINE void multiply_some(const int vectors, const float *restrict left, int64_t step, int64_t apart,
                          const float *restrict right, int64_t stride, int64_t terms, float *restrict made, int64_t width,
                          int64_t columns, int count, int first) {
    lanes sums[ROWS][WIDE] = {{{0}}};
    const float *rows[ROWS];
    for (int row = 0; row < ROWS; row++)
        rows[row] = left + (row < count ? row : 0) * step;
    for (int64_t t = 0; t < terms; t++) {
        lanes numbers[WIDE];
        for (int v = 0; v < vectors; v++)
            numbers[v] = *(const lanes *)(right + t * stride + v * LANES);
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < vectors; v++)
                sums[row][v] += rows[row][t * apart] * numbers[v];
    }
    for (int row = 0; row < count; row++, made += width)
        for (int v = 0; v < vectors; v++)
            if (columns - v * LANES >= LANES) {
                lanes *part = (lanes *)(made + v * LANES);
                *part = first ? sums[row][v] : *part + sums[row][v];
            } else
                for (int64_t k = v * LANES; k < columns; k++)
                    made[k] = first ? sums[row][v][k - v * LANES] : made[k] + sums[row][v][k - v * LANES];
}

/* The same for at most LANES columns. */
INLINE void multiply(const float *restrict left, int64_t step, int64_t apart, const float *restrict right, int64_t stride,
                     int64_t terms, float *restrict made, int64_t width, int64_t columns, int count, int first) {
    multiply_some(1, left, step, apart, right, stride, terms, made, width, columns, count, first);
}
