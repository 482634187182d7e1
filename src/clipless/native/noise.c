/* Normal noise of a key, added to what is to be released and rounded to a grid: AES-256 in counter mode, Box-Muller in double
   precision, product, sum and rounding in one pass. The compiled form of `by_numpy` in noise/adding.py.

   Every operation rounds once (no contraction to fused operations, see hatch_build.py), so the result depends on neither
   compiler nor processor, and equals numpy's bit for bit. Constants and order of operations are those of noise/normals.py;
   change both or none. Keys and random bits are erased before a function returns. */

#include "processors.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

/* Numbers made together, in pairs: number i and number PAIRS+i are the coordinates of one point. */
#define PAIRS 512
#define CHUNK (2 * PAIRS)
#define ROUNDS 14

/* The random bits of a chunk, as they come from the cipher. */
struct bits {
    uint64_t radius[PAIRS], angle[PAIRS];
};
#define BLOCKS ((int64_t)(sizeof(struct bits) / 16))

static inline double as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Overwrite, also where the compiler sees that nobody reads it again. */
static void erase(void *memory, size_t size) {
    memset(memory, 0, size);
    __asm__ __volatile__("" : : "r"(memory) : "memory");
}

FOR_EACH_PROCESSOR
static void normals(const struct bits *restrict bits, double *restrict noise) {
    for (int i = 0; i < PAIRS; i++) {
        /* The squared radius: -2 log u with u from 2**-88 to 1, as u = (1 + f) 2**k with 1 + f close to 1. The 52 upper bits
           of u are in the first word, 12 more below them, and 24 in the second word, with the last one set. */
        uint64_t high = 0x3ff0000000000000 | bits->radius[i] >> 12;
        uint64_t low = 0x3cb0000000010000 | (bits->radius[i] << 40 & 0x000fff0000000000) |
                       (bits->angle[i] << 13 & 0x000000ffffff0000);
        uint64_t u = double_bits((as_double(high) - (1.0 + 0x1p-52)) + as_double(low));
        uint64_t scale = (u + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd)) >> 52;
        double k = as_double(0x4330000000000000 | scale) - (0x1p52 + 1023.0);
        double f = as_double(u - (scale << 52) + 0x3ff0000000000000) - 1.0;
        double s = f / (f + 2.0), z = s * s;
        double log = z * -0.332438941803548 + -0.36280370404986495;
        log = log * z + -0.44445724953699084;
        log = log * z + -0.571428482730327;
        log = log * z + -0.800000000224244;
        log = log * z + -1.3333333333332416;
        log = log * z + -4.0;
        noise[i] = log * s + k * -1.3862943611198906;
    }
    for (int i = 0; i < PAIRS; i++) { /* a loop of its own: a processor has few of a long one under way at once */
        double radius = sqrt(noise[i]);

        /* The angle: 37 bits for a place within an eighth of the circle, three more for the eighth. */
        uint64_t word = bits->angle[i];
        double t = as_double((word >> 12 & 0x000fffffffff8000) | 0x3ff0000000004000) - 1.0, q = t * t;
        double sine = q * 6.877360573166326e-12 + -1.7571500746983935e-09;
        sine = sine * q + 3.133616225433416e-07;
        sine = sine * q + -3.657620415891387e-05;
        sine = sine * q + 0.002490394570188844;
        sine = sine * q + -0.08074551218828054;
        sine = sine * q + 0.7853981633974483;
        sine = sine * t;
        double cosine = q * 1.1384778780982284e-10 + -2.461006226754435e-08;
        cosine = cosine * q + 3.5908597712602535e-06;
        cosine = cosine * q + -0.00032599188676870125;
        cosine = cosine * q + 0.0158543442438019;
        cosine = cosine * q + -0.30842513753404227;
        cosine = cosine * q + 1.0;
        uint64_t x = double_bits(cosine * radius), y = double_bits(sine * radius);
        noise[i] = as_double((word & 4 ? y : x) ^ word << 63);
        noise[i + PAIRS] = as_double((word & 4 ? x : y) ^ (word << 62 & 0x8000000000000000));
    }
}

/* into[k] = sums[k] + stddev times noise[k], rounded to a multiple of the grid's step, 2**-6 of the power of two below
   stddev, then times weight. Near 1.5 * 2**52 steps floating-point numbers are one step apart. The sums are double if they
   are `exact`, and otherwise float. */
FOR_EACH_PROCESSOR
static void add_scaled(float *restrict into, const void *sums, int64_t exact, int64_t at, const double *restrict noise,
                       double stddev, double weight, int64_t count) {
    double far = 0x1.8p52 * as_double((double_bits(stddev) & 0x7ff0000000000000) - (6ull << 52));
    const double *restrict doubles = (const double *)sums + at;
    const float *restrict floats = (const float *)sums + at;
    if (exact)
        for (int64_t k = 0; k < count; k++)
            into[k] = (float)((((noise[k] * stddev + doubles[k]) + far) - far) * weight);
    else
        for (int64_t k = 0; k < count; k++)
            into[k] = (float)((((noise[k] * stddev + (double)floats[k]) + far) - far) * weight);
}

/* The next round's key, from the two before it and the word that the cipher's own table makes of the last. The constants are
   part of the instructions, so this is no loop. */
#define NEXT_KEY(keys, at, constant, word)                                                                               \
    do {                                                                                                                 \
        __m128i key = keys[(at) - 2];                                                                                    \
        key = _mm_xor_si128(key, _mm_slli_si128(key, 4));                                                                \
        key = _mm_xor_si128(key, _mm_slli_si128(key, 8));                                                                \
        __m128i turned = _mm_aeskeygenassist_si128(keys[(at) - 1], constant);                                            \
        keys[at] = _mm_xor_si128(key, _mm_shuffle_epi32(turned, word));                                                  \
    } while (0)

__attribute__((target("aes,ssse3"))) static void expand(const uint8_t *key, __m128i keys[ROUNDS + 1]) {
    keys[0] = _mm_loadu_si128((const __m128i *)key);
    keys[1] = _mm_loadu_si128((const __m128i *)(key + 16));
    NEXT_KEY(keys, 2, 0x01, 0xff);
    NEXT_KEY(keys, 3, 0x00, 0xaa);
    NEXT_KEY(keys, 4, 0x02, 0xff);
    NEXT_KEY(keys, 5, 0x00, 0xaa);
    NEXT_KEY(keys, 6, 0x04, 0xff);
    NEXT_KEY(keys, 7, 0x00, 0xaa);
    NEXT_KEY(keys, 8, 0x08, 0xff);
    NEXT_KEY(keys, 9, 0x00, 0xaa);
    NEXT_KEY(keys, 10, 0x10, 0xff);
    NEXT_KEY(keys, 11, 0x00, 0xaa);
    NEXT_KEY(keys, 12, 0x20, 0xff);
    NEXT_KEY(keys, 13, 0x00, 0xaa);
    NEXT_KEY(keys, 14, 0x40, 0xff);
}

/* The bits of a chunk: counters from BLOCKS times its number on, big-endian, eight at a time. */
__attribute__((target("aes,ssse3"))) static void keystream(const __m128i *keys, int64_t chunk, struct bits *bits) {
    uint64_t counter = (uint64_t)(chunk * BLOCKS);
    for (__m128i *out = (__m128i *)bits; out < (__m128i *)(bits + 1); out += 8, counter += 8) {
        __m128i x[8];
        for (int k = 0; k < 8; k++)
            x[k] = _mm_xor_si128(_mm_set_epi64x((long long)__builtin_bswap64(counter + (uint64_t)k), 0), keys[0]);
        for (int round = 1; round < ROUNDS; round++)
            for (int k = 0; k < 8; k++)
                x[k] = _mm_aesenc_si128(x[k], keys[round]);
        for (int k = 0; k < 8; k++)
            _mm_storeu_si128(out + k, _mm_aesenclast_si128(x[k], keys[ROUNDS]));
    }
}

/* The same with instructions for four blocks each, where the processor has them. */
#if __GNUC__ >= 9 || defined(__clang__)
#define WIDE 1
__attribute__((target("vaes,avx512f,avx512bw"))) static void wide_keystream(const __m128i *keys, int64_t chunk,
                                                                            struct bits *bits) {
    const __m512i swap = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    long long first = (long long)(chunk * BLOCKS);
    __m512i counter = _mm512_set_epi64(first + 3, 0, first + 2, 0, first + 1, 0, first, 0);
    for (__m512i *out = (__m512i *)bits; out < (__m512i *)(bits + 1); out += 8) {
        __m512i x[8], key = _mm512_broadcast_i32x4(keys[0]);
        for (int k = 0; k < 8; k++, counter = _mm512_add_epi64(counter, four))
            x[k] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, swap), key);
        for (int round = 1; round < ROUNDS; round++) {
            key = _mm512_broadcast_i32x4(keys[round]);
            for (int k = 0; k < 8; k++)
                x[k] = _mm512_aesenc_epi128(x[k], key);
        }
        key = _mm512_broadcast_i32x4(keys[ROUNDS]);
        for (int k = 0; k < 8; k++)
            _mm512_storeu_si512(out + k, _mm512_aesenclast_epi128(x[k], key));
    }
}
#else
#define WIDE 0
#define wide_keystream keystream
#endif

/* The processor is asked once: on a virtual machine the question leaves it, which takes longer than a small release. */
static int has_wide_cipher(void) {
    static int known;
    if (!known) {
        unsigned a, b, c, d;
        known = WIDE && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 9 & 1)
                    ? 1
                    : -1;
    }
    return known > 0;
}

/* So many blocks of 16 bytes under a key, from the counter of these two halves on; the lower half must not overflow. */
__attribute__((target("aes,ssse3"))) static void write_blocks(const __m128i *keys, int64_t high, int64_t low, __m128i *out,
                                                              int64_t blocks) {
    for (int64_t k = 0; k < blocks; k++) {
        __m128i x = _mm_set_epi64x((long long)__builtin_bswap64((uint64_t)(low + k)),
                                   (long long)__builtin_bswap64((uint64_t)high));
        x = _mm_xor_si128(x, keys[0]);
        for (int round = 1; round < ROUNDS; round++)
            x = _mm_aesenc_si128(x, keys[round]);
        _mm_storeu_si128(out + k, _mm_aesenclast_si128(x, keys[ROUNDS]));
    }
}

void clipless_keystream(const uint8_t *key, int64_t high, int64_t low, uint8_t *out, int64_t blocks) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("ssse3"))
        return;
    __m128i keys[ROUNDS + 1];
    expand(key, keys);
    write_blocks(keys, high, low, (__m128i *)out, blocks);
    erase(keys, sizeof keys);
}

/* Tensors laid end to end: the one of number k has the places from starts[k] up to starts[k+1]. A null pointer is a gap:
   its numbers are skipped, and chunks that lie inside it are not drawn. */
static void add_noise(const __m128i *keys, int wide, float *const *into, const void *const *sums, const int64_t *exact,
                      const double *stddevs, double weight, const int64_t *starts, int64_t tensors, int64_t chunk,
                      int64_t end) {
    struct bits bits;
    double noise[CHUNK];
    int64_t tensor = 0;
    for (int64_t high = tensors; high - tensor > 1;) {
        int64_t middle = tensor + (high - tensor) / 2;
        if (starts[middle] <= chunk * CHUNK)
            tensor = middle;
        else
            high = middle;
    }
    for (; chunk < end; chunk++) {
        while (tensor < tensors && starts[tensor + 1] <= chunk * CHUNK)
            tensor++;
        if (tensor < tensors && !into[tensor] && starts[tensor + 1] >= (chunk + 1) * CHUNK)
            continue;
        (wide ? wide_keystream : keystream)(keys, chunk, &bits);
        normals(&bits, noise);
        int64_t from = chunk * CHUNK, stop = from + CHUNK < starts[tensors] ? from + CHUNK : starts[tensors];
        for (int64_t place = from; place < stop;) {
            while (starts[tensor + 1] <= place)
                tensor++;
            int64_t last = starts[tensor + 1] < stop ? starts[tensor + 1] : stop, at = place - starts[tensor];
            if (into[tensor])
                add_scaled(into[tensor] + at, sums[tensor], exact[tensor], at, noise + (place - from), stddevs[tensor],
                           weight, last - place);
            place = last;
        }
    }
    erase(&bits, sizeof bits);
    erase(noise, sizeof noise);
}

/* The numbers themselves, of so many chunks from the first one on: for results that are not float32. The check compares them
   bit by bit, where a release shows rounded sums. */
void clipless_normals(const uint8_t *key, double *noise, int64_t first, int64_t chunks, int64_t narrow) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("ssse3"))
        return;
    struct bits bits;
    __m128i keys[ROUNDS + 1];
    expand(key, keys);
    int wide = !narrow && has_wide_cipher();
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        (wide ? wide_keystream : keystream)(keys, first + chunk, &bits);
        normals(&bits, noise + chunk * CHUNK);
    }
    erase(&bits, sizeof bits);
    erase(keys, sizeof keys);
}

/* For all elements of all tensors; `exact` tells which sums are double. A processor without AES of its own does nothing, which the check at the first use sees.
   `narrow` says to do without the instructions for four blocks. */
void clipless_release(const uint8_t *key, float *const *into, const void *const *sums, const int64_t *exact,
                      const double *stddevs, double weight, const int64_t *starts, int64_t tensors, int64_t narrow,
                      int64_t threads) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("ssse3"))
        return;
    __m128i keys[ROUNDS + 1];
    expand(key, keys);
    int wide = !narrow && has_wide_cipher();
    int64_t chunks = (starts[tensors] + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        add_noise(keys, wide, into, sums, exact, stddevs, weight, starts, tensors, chunks * k / threads,
                  chunks * (k + 1) / threads);
    erase(keys, sizeof keys);
}
#endif
