/* Products with a matrix that is used again and again, laid out once so that it is read from end to end. */

#include "tile.h"
#include "turned.h"

/* So many products are added up in one go, and these in the result, so that rounding errors stay small. */
#define RUN 256

/* How many columns have room in panels. */
static inline int64_t in_panels(int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL; }

/* matrix [terms,columns] as panels [in_panels(columns)/PANEL,terms,PANEL], with zeros beyond the columns. */
INLINE void lay_in_panels(const float *restrict matrix, int64_t terms, int64_t columns, float *restrict panels) {
    for (int64_t column = 0; column < columns; column += PANEL) {
        int64_t some = columns - column < PANEL ? columns - column : PANEL;
        for (int64_t k = 0; k < terms; k++, panels += PANEL) {
            memset(panels + some, 0, (PANEL - some) * sizeof *panels);
            memcpy(panels, matrix + k * columns + column, some * sizeof *panels);
        }
    }
}

/* The same for a matrix that is given as its columns, turned [columns,terms]. */
INLINE void turn_into_panels(const float *restrict turned, int64_t terms, int64_t columns, float *restrict panels) {
    memset(panels + (in_panels(columns) - PANEL) * terms, 0, PANEL * terms * sizeof *panels);
    for (int64_t column = 0; column < columns; column += QUAD)
        turn_rows(turned + column * terms, terms, columns - column, terms,
                  panels + column / PANEL * PANEL * terms + column % PANEL, PANEL);
}

/* made [rows,columns] = left [rows,terms] times the matrix, added to what is there if it `adds`. Rows of left are `step` apart
   and those of made `columns`. What a row becomes does not depend on the others. */
INLINE void times_panels(const float *restrict left, int64_t step, int64_t rows, const float *restrict panels, int64_t terms,
                         float *restrict made, int64_t columns, int adds) {
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t k = 0; k < terms; k += RUN)
            for (int64_t row = 0; row < rows; row += ROWS)
                multiply(left + row * step + k, step, 1, panels + column * terms + k * PANEL, PANEL,
                         terms - k < RUN ? terms - k : RUN, made + row * columns + column, columns, columns - column,
                         rows - row < ROWS ? rows - row : ROWS, !adds && !k);
}
