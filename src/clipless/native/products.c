/* Sums of outer products of rows: total [outputs,width] = Σ_b factor[b]·left[b]ᵀ·right[b], by weights for many tensors at once, or
   without weights for each record.

   A product is a structure of words of 64 bits. */

#include "lengths.h"
#include "tile.h"

/* So many rows are added up in one go, and these in the total, so that rounding errors stay small. */
#define RUN 256
/* So many outputs at a time stay in the cache, once they are laid out tile by tile. */
#define BLOCK 256
/* With at most so many outputs or columns it takes longer to lay them out than to read them where they are. */
#define NEAR 128

struct product {
    float *total;
    const float *left, *right, *factors;
    int64_t rows, outputs, width, keeps;
};

/* Some columns of a run times the factors, if there are any, times the scale, with zeros up to PANEL of them. */
INLINE void weighted_columns(const float *restrict right, const float *restrict factors, float scale, int64_t rows,
                             int64_t width, int64_t columns, float *restrict room) {
    for (int64_t b = 0; b < rows; b++, right += width, room += PANEL) {
        float factor = factors ? factors[b] * scale : scale;
        if (columns >= PANEL)
            for (int64_t k = 0; k < PANEL; k++)
                room[k] = right[k] * factor;
        else
            for (int64_t k = 0; k < PANEL; k++)
                room[k] = k < columns ? right[k] * factor : 0;
    }
}

/* Some outputs of a run as [outputs/ROWS,rows,ROWS]. */
INLINE void lay_out(const float *restrict left, int64_t rows, int64_t apart, int64_t outputs, float *restrict room) {
    for (int64_t o = 0; o < outputs; o += ROWS)
        for (int64_t b = 0; b < rows; b++, room += ROWS)
            if (outputs - o >= ROWS)
                memcpy(room, left + b * apart + o, ROWS * sizeof *room);
            else
                memcpy(room, left + b * apart + o, (outputs - o) * sizeof *room);
}

/* The part of a sum from output `first` up to `last` and from column `from` up to `to`. */
FOR_EACH_PROCESSOR
static void add_part(const struct product *sum, float scale, int64_t first, int64_t last, int64_t from, int64_t to,
                     float *restrict tiles) {
    float columns[RUN * PANEL];
    if (!sum->rows && !sum->keeps)
        for (int64_t o = first; o < last; o++)
            memset(sum->total + o * sum->width + from, 0, (to - from) * sizeof *sum->total);
    for (; first < last; first += BLOCK) {
        int64_t outputs = last - first < BLOCK ? last - first : BLOCK;
        for (int64_t run = 0; run < sum->rows; run += RUN) {
            int64_t rows = sum->rows - run < RUN ? sum->rows - run : RUN, apart = sum->outputs, tile = 1;
            const float *left = sum->left + run * sum->outputs + first;
            if (sum->outputs > NEAR && sum->width > NEAR) { /* else there need not be room */
                lay_out(left, rows, apart, outputs, tiles);
                left = tiles, apart = ROWS, tile = rows;
            }
            for (int64_t k = from; k < to; k += PANEL) {
                weighted_columns(sum->right + run * sum->width + k, sum->factors ? sum->factors + run : 0, scale, rows,
                                 sum->width, to - k, columns);
                for (int64_t o = 0; o < outputs; o += ROWS)
                    multiply(left + o * tile, 1, apart, columns, PANEL, rows, sum->total + (first + o) * sum->width + k,
                             sum->width, to - k, outputs - o < ROWS ? outputs - o : ROWS, !run && !sum->keeps);
            }
        }
    }
}

FOR_EACH_PROCESSOR
static double length_of(const float *row, int64_t width) { return squared_length(row, width); }

/* The share of `count` in pieces of `size` that a thread begins with. */
static inline int64_t share(int64_t count, int64_t size, int64_t thread, int64_t threads) {
    int64_t begin = (count + size - 1) / size * thread / threads * size;
    return begin < count ? begin : count;
}

/* What is in a total is kept, or not. Every thread has an equal share of the outputs of each sum, or of its columns if there are
   more of these, and room for [BLOCK,RUN] in the memory, if one has more outputs and columns than are near. */
void clipless_add_products(const struct product *sums, int64_t count, double scale, float *memory, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *tiles = memory + thread * RUN * BLOCK;
        for (const struct product *sum = sums; sum < sums + count; sum++)
            if (sum->width > sum->outputs)
                add_part(sum, (float)scale, 0, sum->outputs, share(sum->width, PANEL, thread, threads),
                         share(sum->width, PANEL, thread + 1, threads), tiles);
            else
                add_part(sum, (float)scale, share(sum->outputs, ROWS, thread, threads),
                         share(sum->outputs, ROWS, thread + 1, threads), 0, sum->width, tiles);
    }
}

/* made [records,outputs,width] = Σ_t left[b,t]ᵀ·right[b,t], and the squared length of each record. The memory is as above. */
void clipless_write_products(const float *left, const float *right, float *made, double *squares, int64_t records,
                             const int64_t *sizes, float *memory, int64_t threads) {
    int64_t rows = sizes[0], outputs = sizes[1], width = sizes[2];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *tiles = memory + thread * RUN * BLOCK;
        for (int64_t b = thread * records / threads; b < (thread + 1) * records / threads; b++) {
            struct product one = {made + b * outputs * width, left + b * rows * outputs, right + b * rows * width, 0, rows,
                                  outputs, width, 0};
            add_part(&one, 1.0f, 0, outputs, 0, width, tiles);
            squares[b] = length_of(one.total, outputs * width);
        }
    }
}
