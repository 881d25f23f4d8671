// Constants of softmax.
#pragma once

#define INF __int_as_float(0x7f800000)
static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
