"""`python -m benchmarks.now` says what time it is, in nanoseconds: a program that starts from a template."""

import time

if __name__ == "__main__":
    print(time.time_ns())
