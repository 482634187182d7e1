/* Rows of a matrix turned into columns. */

#ifndef CLIPLESS_TURNED
#define CLIPLESS_TURNED

#include "lanes.h"

/* So many rows are turned at a time. */
#define QUAD 4

typedef float quad __attribute__((vector_size(QUAD * sizeof(float)), aligned(sizeof(float))));

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES 1
/* 4x4 numbers, in place. */
INLINE void turn_block(quad rows[QUAD]) {
    quad a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5), b = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
    quad c = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5), d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
    rows[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), rows[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    rows[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5), rows[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}
#endif
#endif
#ifndef SHUFFLES
INLINE void turn_block(quad rows[QUAD]) {
    for (int row = 1; row < QUAD; row++)
        for (int column = 0; column < row; column++) {
            float number = rows[row][column];
            rows[row][column] = rows[column][row], rows[column][row] = number;
        }
}
#endif

/* `width` numbers of `count` rows, QUAD at most, which lie `step` apart: to `width` rows of `count` numbers, `apart` apart. */
INLINE void turn_rows(const float *restrict rows, int64_t step, int64_t count, int64_t width, float *restrict made,
                      int64_t apart) {
    int64_t k = 0;
    for (; count >= QUAD && k + QUAD <= width; k += QUAD) {
        quad block[QUAD];
        for (int row = 0; row < QUAD; row++)
            block[row] = *(const quad *)(rows + row * step + k);
        turn_block(block);
        for (int row = 0; row < QUAD; row++)
            *(quad *)(made + (k + row) * apart) = block[row];
    }
    for (; k < width; k++)
        for (int row = 0; row < QUAD && row < count; row++)
            made[k * apart + row] = rows[row * step + k];
}

#endif
