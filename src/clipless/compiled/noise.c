/* Normal noise of a key, added to what is to be released: AES-256 in counter mode, `clipless_normals`, product and sum in
   one pass. The compiled form of `release` in noise/seeded_source.py, equal to it bit for bit (see normals.c). */

#include "processors.h"

#if defined(__x86_64__) && defined(__GNUC__) && defined(_OPENMP)
#include <immintrin.h>

/* Numbers made together, of numbers with the same first half of the counter. */
#define CHUNK 1024
#define BLOCK (1 << 18)
#define ROUNDS 14

void clipless_normals(uint32_t *words, int64_t count);

#define WITH_AES __attribute__((target("aes,ssse3")))

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

WITH_AES
static void expand(const uint8_t *key, __m128i keys[ROUNDS + 1]) {
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

/* The words of the keystream from place `first` of all numbers on: counter mode, big-endian, eight at a time. */
WITH_AES
static void keystream(const __m128i keys[ROUNDS + 1], int64_t first, uint32_t words[CHUNK]) {
    long long half = (long long)__builtin_bswap64((uint64_t)(first / BLOCK));
    uint64_t counter = (uint64_t)(first % BLOCK / 4);
    for (__m128i *out = (__m128i *)words; out < (__m128i *)(words + CHUNK); out += 8, counter += 8) {
        __m128i x[8];
        for (int k = 0; k < 8; k++)
            x[k] = _mm_xor_si128(_mm_set_epi64x((long long)__builtin_bswap64(counter + (uint64_t)k), half), keys[0]);
        for (int round = 1; round < ROUNDS; round++)
            for (int k = 0; k < 8; k++)
                x[k] = _mm_aesenc_si128(x[k], keys[round]);
        for (int k = 0; k < 8; k++)
            _mm_storeu_si128(out + k, _mm_aesenclast_si128(x[k], keys[ROUNDS]));
    }
}

FOR_EACH_PROCESSOR
static void add_scaled(float *into, const float *sums, const float *noise, float stddev, int64_t count) {
    for (int64_t k = 0; k < count; k++)
        into[k] = sums[k] + noise[k] * stddev;
}

/* Tensors laid end to end: the one of number k has the places from starts[k] up to starts[k+1]. */
static void add_noise(const __m128i *keys, float *const *into, const float *const *sums, const float *stddevs,
                      const int64_t *starts, int64_t tensors, int64_t chunk, int64_t end) {
    int64_t tensor = 0;
    for (int64_t high = tensors; high - tensor > 1;) {
        int64_t middle = tensor + (high - tensor) / 2;
        if (starts[middle] <= chunk * CHUNK)
            tensor = middle;
        else
            high = middle;
    }
    for (; chunk < end; chunk++) {
        uint32_t words[CHUNK];
        keystream(keys, chunk * CHUNK, words);
        clipless_normals(words, CHUNK);
        const float *noise = (const float *)words;
        int64_t from = chunk * CHUNK, stop = from + CHUNK < starts[tensors] ? from + CHUNK : starts[tensors];
        for (int64_t place = from; place < stop;) {
            while (starts[tensor + 1] <= place)
                tensor++;
            int64_t last = starts[tensor + 1] < stop ? starts[tensor + 1] : stop, at = place - starts[tensor];
            add_scaled(into[tensor] + at, sums[tensor] + at, noise + (place - from), stddevs[tensor], last - place);
            place = last;
        }
    }
}

/* into[k] = sums[k] + stddevs[k] times normal numbers, for all elements of all tensors. A processor without AES of its own
   does nothing, which the check at the first use sees. */
void clipless_release(const uint8_t *key, float *const *into, const float *const *sums, const float *stddevs,
                      const int64_t *starts, int64_t tensors, int64_t threads) {
    if (!__builtin_cpu_supports("aes") || !__builtin_cpu_supports("ssse3"))
        return;
    __m128i keys[ROUNDS + 1];
    expand(key, keys);
    int64_t chunks = (starts[tensors] + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        add_noise(keys, into, sums, stddevs, starts, tensors, chunks * k / threads, chunks * (k + 1) / threads);
}
#endif
