/* Ghost norms: for one record with inputs a [t,i] and gradients g [t,o], ‖Σ_t g_tᵀ a_t‖² = Σ_{s,t} ⟨a_s,a_t⟩·⟨g_s,g_t⟩.

   Both Gram matrices are symmetric: one half of their tiles is made, some rows at a time, multiplied and added up. */

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

/* found: the squared norm, the sum of the positions' lengths, and the largest ‖a_t‖² and ‖g_t‖². */
FOR_EACH_PROCESSOR
static void one_record(const float *restrict a, const float *restrict g, const struct matrix *left, const struct matrix *right,
                       int64_t positions, double *restrict found, float *restrict memory) {
    double square = 0, length = 0, most_a = 0, most_g = 0;
    for (int64_t first = 0; first < positions; first += STRIP) {
        int64_t beyond = positions - first, rows = beyond < STRIP ? beyond : STRIP;
        int64_t room = (beyond + LANES - 1) / LANES * LANES;
        float *tiles_a = memory, *tiles_g = memory + STRIP * room, *across = memory + 2 * STRIP * room;
        strip_of_products(a + first * left->position, left, rows, beyond, across, room, tiles_a);
        strip_of_products(g + first * right->position, right, rows, beyond, across, room, tiles_g);
        for (int64_t row = 0; row < rows; row += ROWS) {
            int count = rows - row < ROWS ? rows - row : ROWS;
            for (int64_t column = row / LANES * LANES; column < room; column += LANES)
                square += both_sides(tiles_a + row * room + column * ROWS, tiles_g + row * room + column * ROWS, column - row,
                                     count);
            for (int64_t k = row; k < row + count; k++) {
                int64_t diagonal = row * room + k / LANES * LANES * ROWS + (k - row) * LANES + k % LANES;
                double x = tiles_a[diagonal], y = tiles_g[diagonal];
                length += sqrt(x * y);
                most_a = x > most_a || x != x ? x : most_a;
                most_g = y > most_g || y != y ? y : most_g;
            }
        }
    }
    found[0] = square, found[1] = length, found[2] = most_a, found[3] = most_g;
}

/* found [records,4] for inputs [records,positions,left.width] and gradients [records,positions,right.width]. Each thread has
   `share` numbers of the memory. */
void clipless_ghost_norms(const float *a, const float *g, const int64_t *sizes, double *found, float *memory, int64_t share,
                          int64_t threads) {
    int64_t records = sizes[0], positions = sizes[1];
    struct matrix left = {a, sizes[2], sizes[3], sizes[4]}, right = {g, sizes[5], sizes[6], sizes[7]};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t b = thread * records / threads; b < (thread + 1) * records / threads; b++)
            one_record(a + b * left.record, g + b * right.record, &left, &right, positions, found + 4 * b,
                       memory + thread * share);
}
