//! Reads the microseconds since boot, including suspension, faster than the kernel's clock.
//!
//! The kernel's clock is accurate and takes about 25 ns. The processor's counter takes 10 ns but has no fixed rate. So
//! the counter only measures the time since this thread last read the kernel's clock, for at most `REACH` ticks, about
//! a millisecond. A counter that jumps, that differs between cores or that changes its rate on another host can make a
//! reading wrong by that much at most. A counter that stops makes the thread's time stop with it. A thread never sees
//! time go back. `docs/adr/0001-clock.md` has the measurements.

pub(super) use source::micros;

#[cfg(target_os = "linux")]
fn kernel_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Both are positive, and 2^64 ns are 584 years.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Other systems have no such clock: the standard library's may stop during a suspension.
#[cfg(not(target_os = "linux"))]
fn kernel_nanos() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(not(target_arch = "x86_64"))]
mod source {
    pub(in crate::clock) fn micros() -> u64 {
        super::kernel_nanos() / 1_000
    }
}

#[cfg(target_arch = "x86_64")]
mod source {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::sync::{Mutex, PoisonError};

    use super::kernel_nanos;

    /// Times are in units of 2^-10 µs, about a nanosecond: a shift makes them microseconds, where nanoseconds would
    /// take a division on the path of every decision.
    const FRACTION_BITS: u32 = 10;

    /// The most ticks of the counter between two readings of the kernel's clock by a thread.
    const REACH: u64 = 1 << 21;
    /// How long the counter is compared with the kernel's clock before its rate is used.
    const CALIBRATION: u64 = 20_000 << FRACTION_BITS;
    /// A prediction that is off by more than this means that the rate has changed.
    const SURPRISE: u64 = 50 << FRACTION_BITS;

    /// Reading the kernel's clock takes fewer ticks than this. If it took more, the thread was interrupted.
    const UNDISTURBED: u64 = 1 << 14;

    /// The same moment on the processor's counter and on the kernel's clock.
    #[derive(Clone, Copy, Debug)]
    struct Moment {
        ticks: u64,
        time: u64,
    }

    thread_local! {
        /// When this thread last read the kernel's clock.
        static ASKED: Cell<Moment> = const { Cell::new(Moment { ticks: 0, time: 0 }) };
        /// The latest time that this thread has returned.
        static LATEST: Cell<u64> = const { Cell::new(0) };
    }

    /// The time in 2^32 ticks; 0 until it has been measured.
    static PACE: AtomicU64 = AtomicU64::new(0);
    /// The moment at which the measurement of the pace began.
    static BEGUN: Mutex<Option<Moment>> = Mutex::new(None);

    #[inline]
    pub(in crate::clock) fn micros() -> u64 {
        let asked = ASKED.get();
        let pace = PACE.load(Relaxed);
        let ticks = counter().wrapping_sub(asked.ticks);
        let time =
            if ticks < REACH && pace > 0 { asked.time + time_in(ticks, pace) } else { ask(asked, pace) };
        // Counters of two cores may differ a little: a thread that moved to another core must not see time go back.
        let latest = time.max(LATEST.get());
        LATEST.set(latest);
        latest >> FRACTION_BITS
    }

    /// The product fits into 64 bits: at most `2 * REACH` ticks, times a pace below 2^35 (a counter of 125 MHz).
    #[inline]
    fn time_in(ticks: u64, pace: u64) -> u64 {
        (ticks * pace) >> 32
    }

    /// Reads the kernel's clock, and measures the pace if it is unknown or no longer right.
    #[cold]
    fn ask(asked: Moment, pace: u64) -> u64 {
        let now = moment();
        let ticks = now.ticks.wrapping_sub(asked.ticks);
        let predicted = asked.time + time_in(ticks.min(2 * REACH), pace);
        let surprised = ticks < 2 * REACH && predicted.abs_diff(now.time) > SURPRISE;
        if pace == 0 || surprised {
            calibrate(now, pace);
        }
        ASKED.set(now);
        now.time
    }

    /// Reads both clocks, up to three times if the thread is interrupted in between. The counter is read last, so that
    /// an interruption makes the time measured from this moment late, never early.
    fn moment() -> Moment {
        let mut tries = 0;
        loop {
            let before = counter();
            let time = fine(kernel_nanos());
            let ticks = counter();
            tries += 1;
            if ticks.wrapping_sub(before) < UNDISTURBED || tries == 3 {
                return Moment { ticks, time };
            }
        }
    }

    /// Nanoseconds in the unit of this module, rounded down. In two parts, because 2^64 / 1024 ns are only 208 days.
    fn fine(nanos: u64) -> u64 {
        ((nanos / 1_000) << FRACTION_BITS) + ((nanos % 1_000) << FRACTION_BITS) / 1_000
    }

    /// Measures the pace of the counter, or starts over if it has changed.
    fn calibrate(now: Moment, pace: u64) {
        let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
        if pace > 0 {
            PACE.store(0, Relaxed);
            *begun = None;
        }
        let start = *begun.get_or_insert(now);
        let (ticks, time) = (now.ticks.wrapping_sub(start.ticks), now.time.saturating_sub(start.time));
        if time < CALIBRATION {
            return;
        }
        let pace = (u128::from(time) << 32) / u128::from(ticks.max(1));
        // Between about 250 MHz and 16 GHz. A counter with any other rate is not reliable, so the kernel's clock is used.
        match u64::try_from(pace) {
            Ok(pace) if (1 << 28..1 << 34).contains(&pace) => PACE.store(pace, Relaxed),
            _ => *begun = Some(now),
        }
    }

    #[inline]
    #[expect(
        unsafe_code,
        reason = "the standard library has no safe function for it; docs/adr/0001-clock.md"
    )]
    fn counter() -> u64 {
        // SAFETY: the instruction reads a register and is part of every x86-64 processor.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_never_goes_back_within_a_thread() {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    let mut last = 0;
                    for _ in 0..2_000_000 {
                        let now = micros();
                        assert!(now >= last, "{now} was read after {last}");
                        last = now;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no thread saw time go back"));
    }

    /// However long the machine pauses between the readings, the middle one lies between the others, give or take the
    /// millisecond for which the counter is trusted.
    #[test]
    fn clock_reading_is_within_a_millisecond() {
        for _ in 0..1_000_000 {
            let before = kernel_nanos() / 1_000;
            let now = micros();
            let after = kernel_nanos() / 1_000;
            assert!(now + 1_000 >= before && now <= after + 1_000, "{before} {now} {after}");
        }
    }
}
