/* Gradients per record of scale and shift after a normalisation along the last dimension, in one pass. */

#include "processors.h"

#define LANES 16
/* Positions are added up in runs, and the runs in the result, so that rounding errors stay small in long sequences. */
#define RUN 128
/* The widest rows that there is room for. */
#define WIDEST 4096

/* The sum of all numbers less `mean`, or of their squares. */
static inline float sum_of(const float *row, float mean, int squares, int64_t width) {
    float sums[LANES] = {0}, total = 0;
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float value = row[k + lane] - mean;
            sums[lane] += squares ? value * value : value;
        }
    for (; k < width; k++)
        total += squares ? (row[k] - mean) * (row[k] - mean) : row[k] - mean;
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

FOR_EACH_PROCESSOR
static void record_sums(const float *restrict x, const float *restrict grad, float *restrict scale, float *restrict shift,
                        int64_t positions, int64_t width, float eps, int64_t centred) {
    float scales[WIDEST], shifts[WIDEST];
    memset(scale, 0, width * sizeof *scale);
    memset(shift, 0, width * sizeof *shift);
    for (int64_t run = 0; run < positions; run += RUN) {
        memset(scales, 0, width * sizeof *scales);
        memset(shifts, 0, width * sizeof *shifts);
        for (int64_t t = run; t < positions && t < run + RUN; t++) {
            const float *restrict row = x + t * width, *restrict g = grad + t * width;
            float mean = centred ? sum_of(row, 0.0f, 0, width) / width : 0.0f;
            float inverse = 1.0f / sqrtf(sum_of(row, mean, 1, width) / width + eps);
            for (int64_t k = 0; k < width; k++) {
                scales[k] += g[k] * ((row[k] - mean) * inverse);
                shifts[k] += g[k];
            }
        }
        for (int64_t k = 0; k < width; k++) {
            scale[k] += scales[k];
            shift[k] += shifts[k];
        }
    }
}

/* From input and gradient [records,positions,width] to the sums over positions [records,width]. `centred` says whether the
   mean is taken off, as layer norm does and root mean square norm does not. */
void clipless_norm_sums(const float *x, const float *grad, float *scale, float *shift, int64_t records, int64_t positions,
                        int64_t width, double eps, int64_t centred, int64_t threads) {
    int64_t size = positions * width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < records; b++)
        record_sums(x + b * size, grad + b * size, scale + b * width, shift + b * width, positions, width, (float)eps,
                    centred);
}
