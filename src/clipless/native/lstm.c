/* All time steps of an LSTM layer in one direction, forward and back, for records that do not wait for each other.

   Rows are records. A row of gates has four blocks of `width`: write, forget, value, show. */

#include "panels.h"

/* So many records go through all time steps together: what they have stays in the cache. */
#define GROUP 64

/* `sizes` has the number of records at each position; beyond its end a record keeps its state. Positions and records are as
   many as there is room for. In the reverse direction the state before a position lies behind it. */
struct layer {
    int64_t positions, records, width, reverse;
    const int64_t *sizes;
};

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

/* From the gates' sums, overwritten by the gates, and the cell state c to the next states and tanh of the new c. */
INLINE void step_rows(float *gates, const float *restrict c, float *restrict new_c, float *restrict tanh_c,
                      float *restrict new_h, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        float *restrict write = gates + row * 4 * width, *restrict forget = write + width;
        float *restrict value = forget + width, *restrict show = value + width;
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
INLINE void back_rows(float *gates, const float *restrict c, const float *restrict tanh_c, const float *restrict of_h,
                      float *restrict of_c, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
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

/* Of `rows` records from `row` on, those that reach a position. */
static inline int64_t reaching(const struct layer *l, int64_t position, int64_t row, int64_t rows) {
    int64_t left = l->sizes[position] - row;
    return left < 0 ? 0 : left < rows ? left : rows;
}

FOR_EACH_PROCESSOR
static void forward(const struct layer *l, float *gates, const float *restrict panels, float *hidden, float *cells,
                    float *tanh_c, int64_t row, int64_t rows) {
    for (int64_t t = 0; t < l->positions; t++) {
        int64_t position = l->reverse ? l->positions - 1 - t : t, here = position * l->records + row;
        int64_t before = ((position + l->reverse) * l->records + row) * l->width;
        int64_t after = ((position + !l->reverse) * l->records + row) * l->width;
        int64_t n = reaching(l, position, row, rows), ended = (rows - n) * l->width;
        float *sums = gates + here * 4 * l->width;
        times_panels(hidden + before, l->width, n, panels, l->width, sums, 4 * l->width, 1);
        step_rows(sums, cells + before, cells + after, tanh_c + here * l->width, hidden + after, n, l->width);
        memcpy(hidden + after + n * l->width, hidden + before + n * l->width, ended * sizeof *hidden);
        memcpy(cells + after + n * l->width, cells + before + n * l->width, ended * sizeof *cells);
    }
}

/* Gradients of the output, of which positions are `position` numbers apart and records `record`, or none. */
struct arriving {
    const float *numbers;
    int64_t position, record;
};

FOR_EACH_PROCESSOR
static void back(const struct layer *l, float *gates, const float *restrict panels, const float *restrict cells,
                 const float *restrict tanh_c, const struct arriving *grad, float *restrict of_h, float *restrict of_c,
                 int64_t to_state, int64_t row, int64_t rows) {
    for (int64_t t = l->positions - 1; t >= 0; t--) {
        int64_t position = l->reverse ? l->positions - 1 - t : t, here = position * l->records + row;
        int64_t before = ((position + l->reverse) * l->records + row) * l->width, n = reaching(l, position, row, rows);
        float *sums = gates + here * 4 * l->width;
        for (int64_t r = 0; grad->numbers && r < n; r++) {
            const float *restrict more = grad->numbers + position * grad->position + (row + r) * grad->record;
            for (int64_t k = 0; k < l->width; k++)
                of_h[r * l->width + k] += more[k];
        }
        back_rows(sums, cells + before, tanh_c + here * l->width, of_h, of_c, n, l->width);
        if (t || to_state)
            times_panels(sums, 4 * l->width, n, panels, 4 * l->width, of_h, l->width, 0);
        memset(sums + n * 4 * l->width, 0, (rows - n) * 4 * l->width * sizeof *sums);
    }
}

FOR_EACH_PROCESSOR
static void lay_weights(const float *restrict weights, int64_t width, int turned, float *restrict panels) {
    if (turned)
        turn_into_panels(weights, width, 4 * width, panels);
    else
        lay_in_panels(weights, 4 * width, width, panels);
}

static struct layer layer_of(const int64_t *numbers, const int64_t *sizes) {
    struct layer l = {numbers[0], numbers[1], numbers[2], numbers[3], sizes};
    return l;
}

/* Which records are thread number k's, in whole tiles. */
static inline int64_t share(int64_t records, int64_t k, int64_t threads) {
    int64_t first = (records + ROWS - 1) / ROWS * k / threads * ROWS;
    return first < records ? first : records;
}

/* gates [positions,records,4·width] have the input's part of the sums, and become the gates; hidden and cells
   [positions+1,records,width] have the initial state; weights [4·width,width]; `panels` is room for them. */
void clipless_lstm_forward(float *gates, const float *weights, float *hidden, float *cells, float *tanh_c, float *panels,
                           const int64_t *numbers, const int64_t *sizes, int64_t threads) {
    struct layer l = layer_of(numbers, sizes);
    lay_weights(weights, l.width, 1, panels);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        for (int64_t row = share(l.records, k, threads), end = share(l.records, k + 1, threads); row < end; row += GROUP)
            forward(&l, gates, panels, hidden, cells, tanh_c, row, end - row < GROUP ? end - row : GROUP);
}

/* The gates become the gradients of their sums, and of_h and of_c [records,width], the gradients of the states after the layer,
   those of the states before it; of_h only on request. */
void clipless_lstm_back(float *gates, const float *weights, const float *cells, const float *tanh_c, const float *grad,
                        float *of_h, float *of_c, float *panels, const int64_t *numbers, const int64_t *sizes,
                        int64_t threads) {
    struct layer l = layer_of(numbers, sizes);
    struct arriving arriving = {grad, numbers[4], numbers[5]};
    lay_weights(weights, l.width, 0, panels);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        for (int64_t row = share(l.records, k, threads), end = share(l.records, k + 1, threads); row < end; row += GROUP)
            back(&l, gates, panels, cells, tanh_c, &arriving, of_h + row * l.width, of_c + row * l.width, numbers[6], row,
                 end - row < GROUP ? end - row : GROUP);
}
