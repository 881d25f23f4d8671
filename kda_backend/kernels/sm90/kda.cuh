// What every KDA kernel for Hopper shares: the head size, the codes of a gate and of beta, sigmoid.
#pragma once

#include "hopper.cuh"

static constexpr int D = 128;  // channels of a key and of a value
static constexpr float LOG2E = 1.4426950408889634f;

// Values of the definitions GATE and BETA, as in contract/inputs.py.
enum GateKind { GATE_LOG = 0, GATE_SOFTPLUS = 1, GATE_BOUNDED = 2 };
enum BetaKind { BETA_GIVEN = 0, BETA_SIGMOID = 1, BETA_TWICE_SIGMOID = 2 };

__device__ __forceinline__ float sigmoid(float x) { return rcp(1.0f + ex2(-LOG2E * x)); }

template <int KIND>
__device__ __forceinline__ float activate_beta(float x) {
    if (KIND == BETA_GIVEN) return x;
    return (KIND == BETA_TWICE_SIGMOID ? 2.0f : 1.0f) * sigmoid(x);
}
