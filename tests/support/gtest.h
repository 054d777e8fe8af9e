// Precompiled for all tests (tests/room.ninja); each includes what it uses.
#ifndef ZERO_TESTS_SUPPORT_GTEST_H_
#define ZERO_TESTS_SUPPORT_GTEST_H_

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#endif  // ZERO_TESTS_SUPPORT_GTEST_H_
