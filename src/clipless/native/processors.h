/* What all files here need: one machine code for each kind of processor, chosen when the library is loaded.

   Threads are OpenMP's, from the pool that torch uses, and no result depends on their number. What they run is a function
   of its own: of a loop that the compiler cuts out for them it would make one machine code only. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float operations must round to float"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
/* How many bits the registers have that the code for this processor uses. */
#define REGISTER_BITS (__builtin_cpu_supports("avx512vl") ? 512 : __builtin_cpu_supports("avx2") ? 256 : 128)
#else
#define FOR_EACH_PROCESSOR
#define REGISTER_BITS 128
#endif

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
