/* Rows times their weights, turned: made[column,row] = rows[row,column] · weights[row]. */

#include "tile.h"

/* So many rows are turned at a time: a column of them fills a line of the cache twice. */
#define BLOCK 32

FOR_EACH_PROCESSOR
static void turn(const float *restrict rows, const float *restrict weights, float *restrict made, int64_t count, int64_t width,
                 int64_t from, int64_t to) {
    for (int64_t row = 0; row < count; row += BLOCK)
        for (int64_t column = from; column < to; column += LANES) {
            float block[LANES][BLOCK];
            int64_t high = count - row < BLOCK ? count - row : BLOCK, wide = to - column < LANES ? to - column : LANES;
            for (int64_t r = 0; r < high; r++) {
                const float *restrict numbers = rows + (row + r) * width + column;
                float weight = weights[row + r];
                for (int64_t c = 0; c < wide; c++)
                    block[c][r] = numbers[c] * weight;
            }
            for (int64_t c = 0; c < wide; c++)
                memcpy(made + (column + c) * count + row, block[c], high * sizeof(float));
        }
}

/* made [width,count] from rows [count,width]. Every thread has an equal share of the columns. */
void clipless_turn(const float *rows, const float *weights, float *made, int64_t count, int64_t width, int64_t threads) {
    int64_t blocks = (width + LANES - 1) / LANES;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t from = blocks * thread / threads * LANES, to = blocks * (thread + 1) / threads * LANES;
        turn(rows, weights, made, count, width, from, to < width ? to : width);
    }
}
