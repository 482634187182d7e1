/* A tile of a matrix product, for one kind of registers: vectors of type VECTOR, TALL rows of them, up to ACROSS in a row, so
   that all sums stay in registers. Included by tile.h once for each kind, which BY(name) tells apart. */

/* made [count,columns] = Σ_t left[row,t] · right[t,column], for columns that fill at most `vectors` vectors; added to what is
   there unless it is the `first` part. Rows of `left` are `step` apart and those of `made` `width`; vector number v of a row
   of `right` begins at places[v], and can be read as a whole. */
INLINE void BY(product)(const int vectors, const float *restrict left, int64_t step, const float *restrict right,
                        const int64_t *restrict places, const struct terms *restrict terms, float *restrict made, int64_t width,
                        int64_t columns, int count, int first) {
    const int64_t lanes_each = sizeof(VECTOR) / sizeof(float);
    VECTOR sums[TALL][ACROSS] = {{{0}}};
    const float *rows[TALL];
    for (int row = 0; row < TALL; row++)
        rows[row] = left + (row < count ? row : 0) * step;
    for (int64_t run = 0; run < terms->runs; run++) {
        const float *from = right + run * terms->right_run;
        int64_t along = run * terms->left_run;
        for (int64_t t = 0; t < terms->count; t++, from += terms->right, along += terms->left) {
            VECTOR numbers[ACROSS];
            for (int v = 0; v < vectors; v++)
                numbers[v] = *(const VECTOR *)(from + places[v]);
            for (int row = 0; row < TALL; row++)
                for (int v = 0; v < vectors; v++)
                    sums[row][v] += rows[row][along] * numbers[v];
        }
    }
    for (int row = 0; row < TALL && row < count; row++, made += width)
        for (int v = 0; v < vectors; v++)
            if (columns - v * lanes_each >= lanes_each) {
                VECTOR *part = (VECTOR *)(made + v * lanes_each);
                *part = first ? sums[row][v] : *part + sums[row][v];
            } else
                for (int64_t k = v * lanes_each; k < columns; k++)
                    made[k] = first ? sums[row][v][k - v * lanes_each] : made[k] + sums[row][v][k - v * lanes_each];
}

#undef VECTOR
#undef TALL
#undef ACROSS
#undef BY
