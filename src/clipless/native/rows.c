/* Gradients per record, written out as rows or as outer products of rows: their squared lengths, what these add up to, and
   their sums by weights, for many tensors at once; and outer products, written out.

   A tensor has `records` rows, one after the other. What a function takes of each is a structure of words of 64 bits. */

#include "lengths.h"
#include "tile.h"

/* So many columns of a total stay in the nearest cache while the rows go by, four at a time. */
#define COLUMNS 2048
/* Terms are added up in runs, runs in chunks, and chunks in the total, so that rounding errors stay small: a term is rounded
   as part of a run, a run as part of a chunk, and so on. gradients/sums.py counts on these numbers. */
#define RUN 64
#define TERMS 256
/* So many outputs at a time stay in the cache, once they are laid out tile by tile. */
#define BLOCK 256
/* With at most so many outputs or columns it takes longer to lay them out than to read them where they are. */
#define NEAR 128

FOR_EACH_PROCESSOR
static void lengths_of(const float *restrict rows, int64_t width, int64_t records, double *restrict lengths) {
    for (int64_t b = 0; b < records; b++)
        lengths[b] = squared_length(rows + b * width, width);
}

struct rows {
    const float *rows;
    int64_t width;
};

/* squares [groups,records], the sum of the group's terms: the squared length of the row of one tensor, times that of another
   unless its number is negative. `lengths` is room for [tensors,records]. Every thread has an equal share of the rows of all
   tensors. */
void clipless_squares(const struct rows *given, int64_t tensors, double *lengths, const int64_t *terms, int64_t count,
                      double *squares, int64_t groups, int64_t records, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t from = tensors * records * thread / threads, to = tensors * records * (thread + 1) / threads;
        for (int64_t k = 0; k < tensors; k++) {
            int64_t row = from > k * records ? from - k * records : 0;
            int64_t end = to - k * records < records ? to - k * records : records;
            if (row < end)
                lengths_of(given[k].rows + row * given[k].width, given[k].width, end - row, lengths + k * records + row);
        }
    }
    memset(squares, 0, groups * records * sizeof *squares);
    for (int64_t k = 0; k < count; k++, terms += 3) {
        double *restrict sum = squares + terms[0] * records;
        const double *one = lengths + terms[1] * records, *other = lengths + (terms[2] < 0 ? 0 : terms[2]) * records;
        for (int64_t b = 0; b < records; b++)
            sum[b] += terms[2] < 0 ? one[b] : one[b] * other[b];
    }
}

/* Norms times a scale, from their squares: infinite if not finite, zero if not above `least`. Whether there is any such norm
   is left in `unusual`. */
void clipless_norms(const double *squares, float *norms, int64_t count, double scale, double least, int64_t *unusual) {
    int64_t found = 0;
    for (int64_t k = 0; k < count; k++) {
        float norm = sqrtf((float)squares[k]);
        int counts = norm > (float)least && norm <= FLT_MAX;
        found |= !counts;
        norms[k] = counts ? norm * (float)scale : norm <= (float)least ? 0 : INFINITY;
    }
    *unusual = found;
}

/* sum [columns] plus the rows times their factors times the scale. */
static inline void add_run(float *restrict sum, const float *restrict a, const float *restrict factors, float scale,
                           int64_t records, int64_t width, int64_t columns) {
    int64_t row = 0;
    for (; row + 4 <= records; row += 4, a += 4 * width) {
        const float *restrict b = a + width, *restrict c = b + width, *restrict d = c + width;
        float fa = factors[row] * scale, fb = factors[row + 1] * scale;
        float fc = factors[row + 2] * scale, fd = factors[row + 3] * scale;
        for (int64_t k = 0; k < columns; k++)
            sum[k] += (fa * a[k] + fb * b[k]) + (fc * c[k] + fd * d[k]);
    }
    for (; row < records; row++, a += width) {
        float factor = factors[row] * scale;
        for (int64_t k = 0; k < columns; k++)
            sum[k] += factor * a[k];
    }
}

/* The same in runs, to a sum of nothing yet. */
static inline void add_chunk(float *restrict sum, const float *restrict a, const float *restrict factors, float scale,
                             int64_t records, int64_t width, int64_t columns) {
    float run[COLUMNS];
    add_run(sum, a, factors, scale, records < RUN ? records : RUN, width, columns);
    for (int64_t row = RUN; row < records; row += RUN) {
        memset(run, 0, columns * sizeof *run);
        add_run(run, a + row * width, factors + row, scale, records - row < RUN ? records - row : RUN, width, columns);
        for (int64_t k = 0; k < columns; k++)
            sum[k] += run[k];
    }
}

FOR_EACH_PROCESSOR
static void add_columns(float *restrict total, const float *restrict rows, const float *restrict factors, float scale,
                        int64_t records, int64_t width, int64_t keeps, int64_t column, int64_t end) {
    float chunk[COLUMNS];
    for (; column < end; column += COLUMNS) {
        int64_t columns = end - column < COLUMNS ? end - column : COLUMNS;
        float *restrict sum = total + column;
        if (!keeps)
            memset(sum, 0, columns * sizeof *sum);
        for (int64_t row = 0; row < records; row += TERMS) {
            int64_t terms = records - row < TERMS ? records - row : TERMS;
            if (!keeps && !row) { /* the total is empty */
                add_chunk(sum, rows + column, factors, scale, terms, width, columns);
                continue;
            }
            memset(chunk, 0, columns * sizeof *chunk);
            add_chunk(chunk, rows + column + row * width, factors + row, scale, terms, width, columns);
            for (int64_t k = 0; k < columns; k++)
                sum[k] += chunk[k];
        }
    }
}

struct weighted {
    float *total;
    const float *rows, *factors;
    int64_t width, keeps;
};

/* total [width] plus, or if it is not kept instead of it, the sum of the rows times their factors [records] times the scale.
   Every thread has an equal share of the columns of all tensors. */
void clipless_add_rows(const struct weighted *sums, int64_t tensors, double scale, int64_t records, int64_t threads) {
    int64_t all = 0;
    for (int64_t k = 0; k < tensors; k++)
        all += sums[k].width;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        int64_t from = all * thread / threads, to = all * (thread + 1) / threads, start = 0;
        for (const struct weighted *sum = sums; sum < sums + tensors; start += sum++->width) {
            int64_t column = from > start ? from - start : 0, end = to - start < sum->width ? to - start : sum->width;
            if (column < end)
                add_columns(sum->total, sum->rows, sum->factors, (float)scale, records, sum->width, sum->keeps, column,
                            end);
        }
    }
}

/* total [outputs,width] = Σ_b factor[b]·left[b]ᵀ·right[b]. */
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

/* The product of a chunk's terms, run by run, to `total` [count,columns] or instead of it. */
INLINE void add_tile(const float *restrict left, int64_t apart, const float *restrict right, int64_t terms,
                     float *restrict total, int64_t width, int64_t columns, int count, int keeps) {
    float made[ROWS * PANEL];
    if (terms <= RUN) {
        multiply(left, 1, apart, right, PANEL, terms, total, width, columns, count, !keeps);
        return;
    }
    for (int64_t t = 0; t < terms; t += RUN)
        multiply(left + t * apart, 1, apart, right + t * PANEL, PANEL, terms - t < RUN ? terms - t : RUN, made, PANEL, PANEL,
                 count, !t);
    if (keeps)
        for (int row = 0; row < count; row++)
            if (columns >= PANEL)
                for (int64_t k = 0; k < PANEL; k++)
                    total[row * width + k] += made[row * PANEL + k];
            else
                for (int64_t k = 0; k < columns; k++)
                    total[row * width + k] += made[row * PANEL + k];
    else
        for (int row = 0; row < count; row++)
            memcpy(total + row * width, made + row * PANEL, (columns < PANEL ? columns : PANEL) * sizeof *total);
}

/* The part of a sum from output `first` up to `last` and from column `from` up to `to`. */
FOR_EACH_PROCESSOR
static void add_part(const struct product *sum, float scale, int64_t first, int64_t last, int64_t from, int64_t to,
                     float *restrict tiles) {
    float columns[TERMS * PANEL];
    if (!sum->rows && !sum->keeps)
        for (int64_t o = first; o < last; o++)
            memset(sum->total + o * sum->width + from, 0, (to - from) * sizeof *sum->total);
    for (; first < last; first += BLOCK) {
        int64_t outputs = last - first < BLOCK ? last - first : BLOCK;
        for (int64_t run = 0; run < sum->rows; run += TERMS) {
            int64_t rows = sum->rows - run < TERMS ? sum->rows - run : TERMS, apart = sum->outputs, tile = 1;
            const float *left = sum->left + run * sum->outputs + first;
            if (sum->outputs > NEAR && sum->width > NEAR) { /* else there need not be room */
                lay_out(left, rows, apart, outputs, tiles);
                left = tiles, apart = ROWS, tile = rows;
            }
            for (int64_t k = from; k < to; k += PANEL) {
                weighted_columns(sum->right + run * sum->width + k, sum->factors ? sum->factors + run : 0, scale, rows,
                                 sum->width, to - k, columns);
                for (int64_t o = 0; o < outputs; o += ROWS)
                    add_tile(left + o * tile, apart, columns, rows, sum->total + (first + o) * sum->width + k, sum->width,
                             to - k, outputs - o < ROWS ? outputs - o : ROWS, run || sum->keeps);
            }
        }
    }
}

/* The share of `count` in pieces of `size` that a thread begins with. */
static inline int64_t share(int64_t count, int64_t size, int64_t thread, int64_t threads) {
    int64_t begin = (count + size - 1) / size * thread / threads * size;
    return begin < count ? begin : count;
}

/* What is in a total is kept, or not. Every thread has an equal share of the outputs of each sum, or of its columns if there are
   more of these, and room for [BLOCK,TERMS] in the memory, if one has more outputs and columns than are near. */
void clipless_add_products(const struct product *sums, int64_t count, double scale, float *memory, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        float *tiles = memory + thread * TERMS * BLOCK;
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
        float *tiles = memory + thread * TERMS * BLOCK;
        for (int64_t b = thread * records / threads; b < (thread + 1) * records / threads; b++) {
            struct product one = {made + b * outputs * width, left + b * rows * outputs, right + b * rows * width, 0, rows,
                                  outputs, width, 0};
            add_part(&one, 1.0f, 0, outputs, 0, width, tiles);
            lengths_of(one.total, outputs * width, 1, squares + b);
        }
    }
}
