// A warp's share of a state in a verification from records: what is held is folded into it, and it
// meets the factors of the chunk's tokens.
#pragma once

#include "verify_tokens.cuh"

static constexpr int TILES = ROWS / 16;     // of rows: warps that share channels
static constexpr int BLOCKS = 8 / SPLIT;    // of 16 channels that a warp has
static constexpr int QUARTERS = 4 / SPLIT;  // of K that a warp has
static constexpr int FOLD_UNROLL = SPLIT == 4 ? 2 : 1;  // records at a time

__device__ __forceinline__ float4 multiply(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
// The part of a number that TF32 has.
__device__ __forceinline__ float high_tf32(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}
__device__ __forceinline__ float4 high_tf32(float4 x) {
    return make_float4(high_tf32(x.x), high_tf32(x.y), high_tf32(x.z), high_tf32(x.w));
}
__device__ __forceinline__ float4 subtract(float4 a, float4 b) {
    return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ float4 select(bool first, float4 a, float4 b) {
    return make_float4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z,
                       first ? a.w : b.w);
}
// c += a b. Lane (g, l) has four channels of a state's row g, b, and by twos a has the same of k D
// and q D of token g: operand A of two products.
__device__ __forceinline__ void multiply_add(float (&c)[4], float4 a01, float4 a23, float4 b) {
    mma_m16n8k8_tf32(c, a01.x, a01.y, a01.z, a01.w, b.x, b.y);
    mma_m16n8k8_tf32(c, a23.x, a23.y, a23.z, a23.w, b.z, b.w);
}

// A warp's share of a state: 16 rows and BLOCKS of 16 channels.
struct WarpState {
    int row, column;  // the lane's first row of the CTA's, and its first channel
    float4 state[2][BLOCKS];

    __device__ __forceinline__ explicit WarpState(const Place& at)
        : row(at.warp % TILES * 16 + at.lane / 4),
          column(at.warp / TILES * (16 * BLOCKS) + at.lane % 4 * 4) {}

    // The element of the lane's State4 or float4 (r, b).
    __device__ __forceinline__ int place(int r, int b) const {
        return (row + 8 * r) * D + column + 16 * b;
    }
    // From what the copy has brought. Lanes of odd rows begin with the second block of two: rows lie
    // in the same banks.
    __device__ __forceinline__ void take(const Shared& s) {
        const State* const tile = reinterpret_cast<const State*>(s.tile) + place(0, 0);
        const bool odd = row % 2;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; b += 2) {
                const State* const from = tile + r * (8 * D) + 16 * b;
                const float4 x = to_float4(*reinterpret_cast<const State4*>(from + 16 * odd));
                const float4 y = to_float4(*reinterpret_cast<const State4*>(from + 16 * !odd));
                state[r][b] = select(odd, y, x);
                state[r][b + 1] = select(odd, x, y);
            }
    }
    __device__ __forceinline__ void put_back(Shared& s) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
                *reinterpret_cast<float4*>(s.tile + place(r, b)) = state[r][b];
    }
    __device__ __forceinline__ void take_back(const Shared& s) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) state[r][b] = load4(s.tile + place(r, b));
    }
    __device__ __forceinline__ void fold(const Shared& s, const Records& records, int count) {
#pragma unroll FOLD_UNROLL
        for (int t = 0; t < count; ++t) {
            const float u[2] = {s.u[t][row], s.u[t][row + 8]};
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float4 k = load4(&records.k[t][column + 16 * b]);
                const float4 decay = load4(&records.decay[t][column + 16 * b]);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float4 y = multiply(state[r][b], decay);
                    state[r][b] = make_float4(fmaf(u[r], k.x, y.x), fmaf(u[r], k.y, y.y),
                                              fmaf(u[r], k.z, y.z), fmaf(u[r], k.w, y.w));
                }
            }
        }
    }
    // Stores the lane's share of the CTA's rows, ``to``, and goes on with it as it is stored.
    __device__ __forceinline__ void store(State* to) {
        State4* const own = reinterpret_cast<State4*>(to + place(0, 0));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const State4 x = as_stored4(state[r][b]);
                own[2 * D * r + 4 * b] = x;
                state[r][b] = to_float4(x);
            }
    }
    // The products of the factors and the state, over the warp's channels.
    __device__ __forceinline__ void multiply_factors(Shared& s, const Place& at) const {
        const int g = at.lane / 4, l = at.lane % 4;
        const float* const from = &s.factors[g][2 * (column - 4 * l) + 4 * l];
        float sums[QUARTERS][2][4];
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) {
            float large[2][4] = {}, small[2][4] = {};
#pragma unroll
            for (int b = 2 * i; b < 2 * i + 2; ++b) {
                const float4 x01 = load4(from + 32 * b), x23 = load4(from + 32 * b + 16);
                const float4 high01 = high_tf32(x01), high23 = high_tf32(x23);
                const float4 low01 = subtract(x01, high01), low23 = subtract(x23, high23);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float4 high = high_tf32(state[r][b]);
                    const float4 low = subtract(state[r][b], high);
                    multiply_add(large[r], high01, high23, high);
                    multiply_add(small[r], low01, low23, high);
                    multiply_add(small[r], high01, high23, low);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][r][j] = large[r][j] + small[r][j];
            if (i % 2 == 1) add(sums[i - 1], sums[i]);
        }
        if (QUARTERS == 4) add(sums[0], sums[QUARTERS / 2]);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int kind = 0; kind < 2; ++kind)
                *reinterpret_cast<float2*>(
                    &s.products[at.warp / TILES][CHUNK * kind + g][row - g + 8 * r + 2 * l]) =
                    make_float2(sums[0][r][2 * kind], sums[0][r][2 * kind + 1]);
    }
    __device__ __forceinline__ static void add(float (&to)[2][4], const float (&x)[2][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int j = 0; j < 4; ++j) to[r][j] += x[r][j];
    }
};
