/* Ghost norms: for one record with inputs a [t,i] and gradients g [t,o], ‖Σ_t g_tᵀ a_t‖² = Σ_{s,t} ⟨a_s,a_t⟩·⟨g_s,g_t⟩.

   Both Gram matrices are symmetric: one half of their tiles is made, some rows at a time, multiplied and added up. Several
   inputs may have the same gradients. */

#include "tile.h"
#include "turned.h"

/* So many products are added up in one go, and these in the tile, so that rounding errors stay small. */
#define RUN 256
/* So many rows of both matrices are kept at a time. */
#define STRIP 128

struct matrix {
    const float *numbers;
    int64_t record, position, width; /* how far apart records and positions are; numbers lie side by side */
};

/* a [positions,width] as [room/LANES,width,LANES], with zeros beyond the positions. */
INLINE void transpose(const float *restrict a, int64_t position, int64_t positions, int64_t width, float *restrict made,
                      int64_t room) {
    if (positions < room)
        memset(made + (room - LANES) * width, 0, LANES * width * sizeof *made);
    for (int64_t t = 0; t < positions; t += QUAD)
        turn_rows(a + t * position, position, positions - t, width, made + t / LANES * LANES * width + t % LANES, LANES);
}

/* The first `rows` rows of a·aᵀ from the diagonal on, as tiles [rows/ROWS,room/LANES,ROWS,LANES]; `across` is room for
   [room,RUN]. */
INLINE void strip_of_products(const float *restrict a, const struct matrix *of, int64_t rows, int64_t positions,
                              float *restrict across, int64_t room, float *restrict tiles) {
    for (int64_t k = 0; k < of->width; k += RUN) {
        int64_t run = of->width - k < RUN ? of->width - k : RUN;
        transpose(a + k, of->position, positions, run, across, room);
        for (int64_t row = 0; row < rows; row += ROWS)
            for (int64_t column = row / LANES * LANES; column < room; column += LANES)
                multiply(a + row * of->position + k, of->position, 1, across + column * run, LANES, run,
                         tiles + row * room + column * ROWS, LANES, LANES, rows - row < ROWS ? rows - row : ROWS, k == 0);
    }
}

/* Σ x·y over a tile, in which number `lane` of row k lies `ahead + lane - k` beyond the diagonal: doubled beyond it, for what
   lies on the other side, where it is left out. */
INLINE double both_sides(const float *restrict x, const float *restrict y, int64_t ahead, int count) {
    double sums[LANES] = {0}, sum = 0;
    for (int k = 0; k < count; k++)
        for (int lane = 0; lane < LANES; lane++) {
            double both = ahead >= ROWS ? 2 : (ahead + lane > k) + (ahead + lane >= k);
            sums[lane] += both * x[k * LANES + lane] * y[k * LANES + lane];
        }
    for (int lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Adds what the first `rows` rows of both matrices contribute to found: the squared norm, the sum of the positions' lengths, and
   the largest ‖a_t‖² and ‖g_t‖². */
INLINE void add_strip(const float *restrict tiles_a, const float *restrict tiles_g, int64_t rows, int64_t room,
                      double *restrict found) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        int count = rows - row < ROWS ? rows - row : ROWS;
        for (int64_t column = row / LANES * LANES; column < room; column += LANES)
            found[0] += both_sides(tiles_a + row * room + column * ROWS, tiles_g + row * room + column * ROWS, column - row, count);
        for (int64_t k = row; k < row + count; k++) {
            int64_t diagonal = row * room + k / LANES * LANES * ROWS + (k - row) * LANES + k % LANES;
            double x = tiles_a[diagonal], y = tiles_g[diagonal];
            found[1] += sqrt(x * y);
            found[2] = x > found[2] || x != x ? x : found[2];
            found[3] = y > found[3] || y != y ? y : found[3];
        }
    }
}

/* found [inputs,4], of which those of one input lie `apart`. */
FOR_EACH_PROCESSOR
static void one_record(const struct matrix *given, int64_t inputs, int64_t record, int64_t positions, double *restrict found,
                       int64_t apart, float *restrict memory) {
    const struct matrix *of_g = given + inputs;
    const float *g = of_g->numbers + record * of_g->record;
    for (int64_t k = 0; k < inputs; k++)
        memset(found + k * apart, 0, 4 * sizeof *found);
    for (int64_t first = 0; first < positions; first += STRIP) {
        int64_t beyond = positions - first, rows = beyond < STRIP ? beyond : STRIP;
        int64_t room = (beyond + LANES - 1) / LANES * LANES;
        float *tiles_a = memory, *tiles_g = memory + STRIP * room, *across = memory + 2 * STRIP * room;
        strip_of_products(g + first * of_g->position, of_g, rows, beyond, across, room, tiles_g);
        for (const struct matrix *of_a = given; of_a < of_g; of_a++) {
            const float *a = of_a->numbers + record * of_a->record;
            strip_of_products(a + first * of_a->position, of_a, rows, beyond, across, room, tiles_a);
            add_strip(tiles_a, tiles_g, rows, room, found + (of_a - given) * apart);
        }
    }
}

/* found [inputs,records,4] for some inputs [records,positions,width] and, given last, their gradients. Each thread has `share`
   numbers of the memory. */
void clipless_ghost_norms(const struct matrix *given, int64_t inputs, int64_t records, int64_t positions, double *found,
                          float *memory, int64_t share, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t b = thread * records / threads; b < (thread + 1) * records / threads; b++)
            one_record(given, inputs, b, positions, found + 4 * b, 4 * records, memory + thread * share);
}
