// The C and C++ library's headers that the runtime's files include, for the precompiled header (cki/sim/headers.py).
// Each file still names those that it needs.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>
