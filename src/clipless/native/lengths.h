/* Squared lengths of rows. */

#include "lanes.h"

/* So many sums of lanes are under way at once. */
#define CHAINS 4
/* So many squares are added up in float, 16 in each lane, and the rest in double. */
#define SQUARES 1024
/* Squares below this lose digits to underflow. */
#define UNDERFLOW 1e-30

/* The sum of all lanes, halves first. */
INLINE float added_up(lanes sums) {
    float four[4], last[LANES];
    memcpy(last, &sums, sizeof last);
    for (int half = LANES / 2; half > 2; half /= 2)
        for (int lane = 0; lane < half; lane++)
            last[lane] += last[lane + half];
    memcpy(four, last, sizeof four);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE double squared_length(const float *restrict row, int64_t width) {
    double total = 0;
    int64_t k = 0;
    while (k + LANES <= width) {
        lanes sums[CHAINS] = {{0}};
        int64_t end = width - k < SQUARES ? width : k + SQUARES;
        for (; k + CHAINS * LANES <= end; k += CHAINS * LANES)
            for (int chain = 0; chain < CHAINS; chain++) {
                lanes numbers = *(const lanes *)(row + k + chain * LANES);
                sums[chain] += numbers * numbers;
            }
        for (; k + LANES <= end; k += LANES) {
            lanes numbers = *(const lanes *)(row + k);
            sums[0] += numbers * numbers;
        }
        total += added_up((sums[0] + sums[2]) + (sums[1] + sums[3]));
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
