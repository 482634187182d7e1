/* Squared lengths of rows. */

#include "lanes.h"

/* So many numbers at a time, and so many sums of each of them under way at once. Wider vectors gain nothing here. */
#define TOGETHER 8
#define CHAINS 8
typedef lanes_256 vector;
/* So many squares are added up in float, 16 in each sum, and the rest in double. */
#define SQUARES 1024
/* Squares below this lose digits to underflow. */
#define UNDERFLOW 1e-30

/* The sum of all lanes, halves first. */
INLINE float added_up(vector sums) {
    float each[TOGETHER];
    memcpy(each, &sums, sizeof each);
    return ((each[0] + each[4]) + (each[2] + each[6])) + ((each[1] + each[5]) + (each[3] + each[7]));
}

INLINE double squared_length(const float *restrict row, int64_t width) {
    double total = 0;
    int64_t k = 0;
    while (k + TOGETHER <= width) {
        vector sums[CHAINS] = {{0}};
        int64_t end = width - k < SQUARES ? width : k + SQUARES;
        for (; k + CHAINS * TOGETHER <= end; k += CHAINS * TOGETHER)
            for (int chain = 0; chain < CHAINS; chain++) {
                vector numbers = *(const vector *)(row + k + chain * TOGETHER);
                sums[chain] += numbers * numbers;
            }
        for (; k + TOGETHER <= end; k += TOGETHER) {
            vector numbers = *(const vector *)(row + k);
            sums[0] += numbers * numbers;
        }
        total += added_up(((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7])));
    }
    for (; k < width; k++)
        total += (double)row[k] * row[k];
    if (total >= width * UNDERFLOW && total <= FLT_MAX)
        return total;
    total = 0;
    for (k = 0; k < width; k++)
        total += (double)row[k] * row[k];
    return total;
}
