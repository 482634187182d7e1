/* Gradients per record of a convolution's weight, written out.

   For one record w[o,c,v,u] = Σ_{y,x} grad[o,y,x] · input[c, y·stride + v·dilation, x·stride + u·dilation]. With enough
   channels these are put innermost, so that LANES of them are computed side by side for each place of the kernel. Otherwise
   the patches of some positions are laid out as rows in the cache and multiplied by the gradient. */

#include "lengths.h"
#include "tile.h"
#include "turned.h"

/* So many numbers of patches are laid out at a time. */
#define PATCHES 24576
#define FEWEST 8
/* Runs of a kernel are copied so many numbers at a time, past their end: what comes next overwrites it. */
#define RUN 8

/* So many places of the kernel at a time keep a processor with 32 wide registers busy. */
#define PLACES 3
/* So many positions are added up in one go, and these in the result, so that rounding errors stay small. */
#define PART 256

/* Records and groups; channels of a group, input and padding; outputs of a group and their positions; kernel, its moves and
   how far apart it sees; whether channels are put innermost. */
struct sizes {
    int64_t records, groups, channels, height, width, above, left, outputs, rows, columns, tall, wide, down, right, apart_v,
        apart_u, innermost;
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
    for (int64_t first = 0; first < positions; first += most) {
        int64_t count = positions - first < most ? positions - first : most;
        for (int64_t t = 0; t < count; t++) {
            int64_t y = (first + t) / s->columns * s->down, x = (first + t) % s->columns * s->right;
            lay_out(s, seen + y * width + x, patches + t * stride, channels, height, width);
        }
        for (int64_t k = 0; k < columns; k += PANEL)
            for (int64_t o = 0; o < s->outputs; o += ROWS)
                multiply(grad + o * positions + first, positions, 1, patches + k, stride, count, out + o * all + k, all,
                         columns - k, s->outputs - o < ROWS ? s->outputs - o : ROWS, first == 0);
    }
}

INLINE void by_patches(const struct sizes *s, const float *restrict input, const float *restrict grad, float *restrict made,
                       float *restrict padded, float *restrict patches) {
    int64_t height = s->height + 2 * s->above, width = s->width + 2 * s->left, kernel = s->tall * s->wide;
    surround(s, input, padded, height, width);
    for (int64_t group = 0; group < s->groups; group++)
        for (int64_t c = 0; c < s->channels; c += LANES)
            some_channels(s, padded + (group * s->channels + c) * height * width,
                          grad + group * s->outputs * s->rows * s->columns,
                          made + (group * s->outputs * s->channels + c) * kernel, patches,
                          s->channels - c < LANES ? s->channels - c : LANES);
}

/* A group's input with zeros around it, [channels/LANES, padded height, padded width, LANES]. */
INLINE void surround_innermost(const struct sizes *s, const float *restrict input, float *restrict padded, int64_t height,
                               int64_t width) {
    memset(padded, 0, whole(s->channels) * height * width * sizeof *padded);
    for (int64_t c = 0; c < s->channels; c += QUAD)
        for (int64_t y = 0; y < s->height; y++)
            turn_rows(input + (c * s->height + y) * s->width, s->height * s->width, s->channels - c, s->width,
                      padded + ((c / LANES * height + y + s->above) * width + s->left) * LANES + c % LANES, LANES);
}

/* made [count,kernel,LANES] at some places of the kernel, only one of them without wide registers, from what LANES channels have
   `apart` from the first position, and the gradient of `count` outputs. */
INLINE void some_places(const int places, const struct sizes *s, const float *restrict seen, const int64_t *restrict apart,
                        int64_t width, const float *restrict grad, int count, float *restrict made, int64_t kernel) {
    int64_t together = s->columns < PART ? PART / s->columns : 1, positions = s->rows * s->columns;
    for (int64_t top = 0; top < s->rows; top += together)
        for (int64_t x = 0; x < s->columns; x += PART) {
            struct terms terms = {s->columns - x < PART ? s->columns - x : PART, 1, s->right * LANES,
                                  s->rows - top < together ? s->rows - top : together, s->columns, s->down * width * LANES};
            const float *from = seen + (top * s->down * width + x * s->right) * LANES, *of_outputs = grad + top * s->columns + x;
            int first = !top && !x;
            if (REGISTER_BITS == 512)
                product_by_512(places, of_outputs, positions, from, apart, &terms, made, kernel * LANES, places * LANES, count,
                               first);
            else
                narrow_product(of_outputs, positions, from + *apart, &terms, made, kernel * LANES, LANES, count, first);
        }
}

/* One group's part of the result, made [outputs,channels,kernel]; `tile` is room for [ROWS,kernel,LANES]. */
INLINE void by_channels(const struct sizes *s, const float *restrict input, const float *restrict grad, float *restrict made,
                        float *restrict padded, float *restrict tile) {
    int64_t height = s->height + 2 * s->above, width = s->width + 2 * s->left, kernel = s->tall * s->wide;
    int wide = REGISTER_BITS == 512;
    surround_innermost(s, input, padded, height, width);
    for (int64_t c = 0; c < s->channels; c += LANES)
        for (int64_t o = 0; o < s->outputs; o += ROWS) {
            const float *seen = padded + c * height * width, *of_outputs = grad + o * s->rows * s->columns;
            int64_t channels = s->channels - c < LANES ? s->channels - c : LANES, places;
            int count = s->outputs - o < ROWS ? s->outputs - o : ROWS;
            for (int64_t k = 0; k < kernel; k += places) {
                int64_t apart[PLACES];
                for (int64_t place = 0; place < PLACES; place++)
                    apart[place] = ((k + place) / s->wide * s->apart_v * width + (k + place) % s->wide * s->apart_u) * LANES;
                places = wide && kernel - k >= PLACES ? PLACES : 1;
                if (places == PLACES)
                    some_places(PLACES, s, seen, apart, width, of_outputs, count, tile + k * LANES, kernel);
                else
                    some_places(1, s, seen, apart, width, of_outputs, count, tile + k * LANES, kernel);
            }
            for (int row = 0; row < count; row++)
                for (int64_t k = 0; k < kernel; k += QUAD)
                    turn_rows(tile + (row * kernel + k) * LANES, LANES, kernel - k, channels,
                              made + ((o + row) * s->channels + c) * kernel + k, kernel);
        }
}

FOR_EACH_PROCESSOR
static double one_record(const struct sizes *s, const float *restrict input, const float *restrict grad,
                         float *restrict made, float *restrict padded, float *restrict room) {
    int64_t weights = s->outputs * s->channels * s->tall * s->wide;
    if (!s->innermost)
        by_patches(s, input, grad, made, padded, room);
    for (int64_t group = 0; s->innermost && group < s->groups; group++)
        by_channels(s, input + group * s->channels * s->height * s->width, grad + group * s->outputs * s->rows * s->columns,
                    made + group * weights, padded, room);
    return squared_length(made, s->groups * weights);
}

/* made [records, outputs, channels, tall, wide], and the squared length of each record, from input [records, channels, height,
   width] and grad [records, outputs, rows, columns]. Each thread has `room` numbers of the memory: `padded` for an input with its
   padding, the others for patches or a tile. */
void clipless_conv_rows(const float *input, const float *grad, float *made, double *squares, const int64_t *numbers,
                        float *memory, int64_t padded, int64_t room, int64_t threads) {
    struct sizes s;
    memcpy(&s, numbers, sizeof s);
    int64_t seen = s.groups * s.channels * s.height * s.width, outputs = s.groups * s.outputs;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t b = thread * s.records / threads; b < (thread + 1) * s.records / threads; b++)
            squares[b] = one_record(&s, input + b * seen, grad + b * outputs * s.rows * s.columns,
                                    made + b * outputs * s.channels * s.tall * s.wide, memory + thread * room,
                                    memory + thread * room + padded);
}
