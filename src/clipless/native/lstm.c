/* The elementwise part of an LSTM cell at one position, in one pass: the compiled form of the cell in grads/cells.py.

   Rows are records. A row of gates has four blocks of `width`: write, forget, value, show. */

#include "processors.h"

/* exp(-x) to a few units in the last place, for x of at least -87, below which it counts as that; NaN stays NaN. */
static inline float decay(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    float n = (x * -1.442695041f + 12582912.0f) - 12582912.0f; /* the nearest whole number */
    float r = (n * -0.693359375f - x) + n * 2.12194440e-4f;
    float p = 0.001388888889f;
    p = p * r + 0.008333333333f;
    p = p * r + 0.041666666667f;
    p = p * r + 0.166666666667f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * as_float((uint32_t)((int32_t)n + 127) << 23);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + decay(x)); }

static inline float hyperbolic_tangent(float x) { return 2.0f / (1.0f + decay(2.0f * x)) - 1.0f; }

/* From the gates' sums, overwritten by the gates, and the cell state c to the next states and tanh of the new c. `more`, if
   there is any, is first added to the sums. */
FOR_EACH_PROCESSOR
static void step_rows(float *gates, const float *restrict more, const float *restrict c, float *restrict new_c, float *restrict tanh_c,
                      float *restrict new_h, int64_t row, int64_t end, int64_t width) {
    for (; row < end; row++) {
        float *restrict write = gates + row * 4 * width, *restrict forget = write + width;
        float *restrict value = forget + width, *restrict show = value + width;
        for (int64_t k = 0; more && k < 4 * width; k++)
            write[k] += more[row * 4 * width + k];
        for (int64_t k = 0; k < width; k++) {
            int64_t at = row * width + k;
            float in = sigmoid(write[k]), keep = sigmoid(forget[k]), out = sigmoid(show[k]);
            float new_value = hyperbolic_tangent(value[k]);
            float state = keep * c[at] + in * new_value, seen = hyperbolic_tangent(state);
            write[k] = in, forget[k] = keep, value[k] = new_value, show[k] = out;
            new_c[at] = state, tanh_c[at] = seen, new_h[at] = out * seen;
        }
    }
}

/* From the gradients of the states after the position to those of the gates' sums, in their place, and of the c before. */
FOR_EACH_PROCESSOR
static void back_rows(float *gates, const float *restrict c, const float *restrict tanh_c, const float *restrict of_h,
                      float *restrict of_c, int64_t row, int64_t end, int64_t width) {
    for (; row < end; row++) {
        float *restrict write = gates + row * 4 * width, *restrict forget = write + width;
        float *restrict value = forget + width, *restrict show = value + width;
        for (int64_t k = 0; k < width; k++) {
            int64_t at = row * width + k;
            float in = write[k], keep = forget[k], new_value = value[k], out = show[k], seen = tanh_c[at], h = of_h[at];
            float cell = of_c[at] + h * out * (1.0f - seen * seen);
            write[k] = cell * new_value * in * (1.0f - in);
            forget[k] = cell * c[at] * keep * (1.0f - keep);
            value[k] = cell * in * (1.0f - new_value * new_value);
            show[k] = h * seen * out * (1.0f - out);
            of_c[at] = cell * keep;
        }
    }
}

void clipless_lstm_step(float *gates, const float *more, const float *c, float *new_c, float *tanh_c, float *new_h,
                        int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        step_rows(gates, more, c, new_c, tanh_c, new_h, rows * k / threads, rows * (k + 1) / threads, width);
}

void clipless_lstm_back(float *gates, const float *c, const float *tanh_c, const float *of_h, float *of_c, int64_t rows,
                        int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        back_rows(gates, c, tanh_c, of_h, of_c, rows * k / threads, rows * (k + 1) / threads, width);
}
