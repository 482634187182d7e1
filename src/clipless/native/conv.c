/* Gradients per record of a convolution's weight, written out.

   For one record w[o,c,v,u] = Σ_{y,x} grad[o,y,x] · input[c, y·stride + v·dilation, x·stride + u·dilation]: the patches of
   some positions are laid out as rows in the cache and multiplied by the gradient, as many positions at a time as fit. */

#include "lengths.h"
#include "tile.h"

/* So many numbers of patches are laid out at a time. */
#define PATCHES 24576
#define FEWEST 8
/* Runs of a kernel are copied so many numbers at a time, past their end: what comes next overwrites it. */
#define RUN 8

/* Records and groups; channels of a group, input and padding; outputs of a group and their positions; kernel, its moves and
   how far apart it sees. */
struct sizes {
    int64_t records, groups, channels, height, width, above, left, outputs, rows, columns, tall, wide, down, right, apart_v,
        apart_u;
};

/* The next multiple of LANES. */
static inline int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* The input with zeros around it, [groups·channels, padded height, padded width]. */
INLINE void surround(const struct sizes *s, const float *restrict input, float *restrict padded, int64_t height,
                            int64_t width) {
    memset(padded, 0, (s->groups * s->channels * height * width + RUN) * sizeof *padded);
    for (int64_t c = 0; c < s->groups * s->channels; c++)
        for (int64_t y = 0; y < s->height; y++)
            memcpy(padded + (c * height + y + s->above) * width + s->left, input + (c * s->height + y) * s->width,
                   s->width * sizeof *padded);
}

/* What the kernel sees of some channels at one position. */
INLINE void lay_out(const struct sizes *s, const float *restrict seen, float *restrict patch, int64_t channels,
                                  int64_t height, int64_t width) {
    for (int64_t c = 0; c < channels; c++)
        for (int64_t v = 0; v < s->tall; v++, patch += s->wide) {
            const float *restrict run = seen + c * height * width + v * s->apart_v * width;
            if (s->apart_u == 1)
                for (int64_t u = 0; u < s->wide; u += RUN)
                    memcpy(patch + u, run + u, RUN * sizeof *patch);
            else
                for (int64_t u = 0; u < s->wide; u++)
                    patch[u] = run[u * s->apart_u];
        }
}

/* The part of the result that some channels of one group give: columns of out [outputs,width]. */
INLINE void some_channels(const struct sizes *s, const float *restrict seen, const float *restrict grad,
                                        float *restrict out, float *restrict patches, int64_t channels) {
    int64_t height = s->height + 2 * s->above, width = s->width + 2 * s->left, positions = s->rows * s->columns;
    int64_t columns = channels * s->tall * s->wide, stride = whole(columns), all = s->channels * s->tall * s->wide;
    int64_t most = PATCHES / stride > FEWEST ? PATCHES / stride : FEWEST;
    int wide = has_wide_registers();
    for (int64_t first = 0; first < positions; first += most) {
        int64_t count = positions - first < most ? positions - first : most;
        for (int64_t t = 0; t < count; t++) {
            int64_t y = (first + t) / s->columns * s->down, x = (first + t) % s->columns * s->right;
            lay_out(s, seen + y * width + x, patches + t * stride, channels, height, width);
        }
        int64_t k = 0;
        for (; wide && k + WIDE * LANES <= columns; k += WIDE * LANES)
            for (int64_t o = 0; o < s->outputs; o += ROWS)
                multiply_some(WIDE, grad + o * positions + first, positions, 1, patches + k, stride, count,
                              out + o * all + k, all, WIDE * LANES, s->outputs - o < ROWS ? s->outputs - o : ROWS,
                              first == 0);
        for (; k < columns; k += LANES)
            for (int64_t o = 0; o < s->outputs; o += ROWS)
                multiply(grad + o * positions + first, positions, 1, patches + k, stride, count,
                         out + o * all + k, all, columns - k < LANES ? columns - k : LANES,
                         s->outputs - o < ROWS ? s->outputs - o : ROWS, first == 0);
    }
}

FOR_EACH_PROCESSOR
static double one_record(const struct sizes *s, const float *restrict input, const float *restrict grad,
                         float *restrict made, float *restrict padded, float *restrict patches) {
    int64_t height = s->height + 2 * s->above, width = s->width + 2 * s->left, kernel = s->tall * s->wide;
    surround(s, input, padded, height, width);
    for (int64_t group = 0; group < s->groups; group++)
        for (int64_t c = 0; c < s->channels; c += LANES)
            some_channels(s, padded + (group * s->channels + c) * height * width,
                          grad + group * s->outputs * s->rows * s->columns,
                          made + (group * s->outputs * s->channels + c) * kernel, patches,
                          s->channels - c < LANES ? s->channels - c : LANES);
    return squared_length(made, s->groups * s->outputs * s->channels * kernel);
}

/* made [records, outputs, channels, tall, wide], and the squared length of each record, from input [records, channels, height, width] and grad [records, outputs,
   rows, columns]. Each thread has `room` numbers of the memory: for an input with its padding, then for patches. */
void clipless_conv_rows(const float *input, const float *grad, float *made, double *squares, const int64_t *numbers,
                        float *memory, int64_t room, int64_t threads) {
    struct sizes s;
    memcpy(&s, numbers, sizeof s);
    int64_t seen = s.groups * s.channels * s.height * s.width, outputs = s.groups * s.outputs;
    int64_t padded = s.groups * s.channels * (s.height + 2 * s.above) * (s.width + 2 * s.left) + RUN;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t b = thread * s.records / threads; b < (thread + 1) * s.records / threads; b++)
            squares[b] = one_record(&s, input + b * seen, grad + b * outputs * s.rows * s.columns,
                                    made + b * outputs * s.channels * s.tall * s.wide, memory + thread * room,
                                    memory + thread * room + padded);
}
