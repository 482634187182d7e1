/* Random words to standard normal numbers: the compiled form of `arithmetic` in noise/normals.py, equal to it bit for bit.

   Every operation rounds once (no contraction to fused operations, see hatch_build.py), so the result depends on neither
   compiler nor processor. Constants and order of operations are those of normals.py; change both or none. */

#include "processors.h"

/* Box-Muller, in place: in every 2*HALF words, word i and word HALF+i become the coordinates of a normal point. */
#define HALF 512

FOR_EACH_PROCESSOR
void clipless_normals(uint32_t *words, int64_t count) {
    for (uint32_t *end = words + count; words < end; words += 2 * HALF) {
        for (int i = 0; i < HALF; i++) {
            /* The radius: sqrt(-2 log u) with u from 2**-32 to 1, as u = (1 + f) 2**k with 1 + f close to 1. */
            uint32_t u = as_bits(((float)(int32_t)(words[i] >> 1) + 0.5f) * 0x1p-31f);
            int32_t k = (int32_t)(u - 0x3f3504f3u) >> 23;
            float f = as_float(u - ((uint32_t)k << 23)) - 1.0f;
            float log = -0.08101558685302734f;
            log = log * f + 0.12712307274341583f;
            log = log * f + -0.12972238659858704f;
            log = log * f + 0.14202174544334412f;
            log = log * f + -0.16642247140407562f;
            log = log * f + 0.20001468062400818f;
            log = log * f + -0.25000298023223877f;
            log = log * f + 0.333333283662796f;
            log = log * f + -0.5f;
            log = log * (f * f) + f;
            log = log + (float)k * 0.6931471824645996f;
            words[i] = as_bits(log * -2.0f);
        }
        for (int i = 0; i < HALF; i++) { /* a loop of its own: a processor has few of a long one under way at once */
            float radius = sqrtf(as_float(words[i]));

            /* The angle: thirty bits turn by at most an eighth of the circle, two more choose the quarter. */
            float angle = (float)(int32_t)(words[i + HALF] << 2) * 3.65729529994141e-10f;
            float square = angle * angle;
            float sine = square * -0.00019587950373534113f + 0.008332748897373676f;
            sine = sine * square + -0.166666641831398f;
            sine = sine * (square * angle) + angle;
            float cosine = square * 2.454804962326307e-05f + -0.001388830365613103f;
            cosine = cosine * square + 0.0416666641831398f;
            cosine = cosine * square + -0.5f;
            cosine = cosine * square + 1.0f;

            uint32_t x = as_bits(cosine * radius), y = as_bits(sine * radius);
            uint32_t swapped = (x ^ y) & (0u - (words[i + HALF] >> 31)), sign = (words[i + HALF] << 1) & 0x80000000u;
            words[i] = x ^ swapped ^ sign;
            words[i + HALF] = y ^ swapped ^ sign ^ (words[i + HALF] & 0x80000000u);
        }
    }
}
