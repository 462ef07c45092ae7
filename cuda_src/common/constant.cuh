// A compile-time choice as an argument of a function or lambda: Constant<true>{}, and decltype(choice)::kValue there.
#pragma once

namespace cki {

template <auto kChoice>
struct Constant {
  static constexpr auto kValue = kChoice;
};

}  // namespace cki
