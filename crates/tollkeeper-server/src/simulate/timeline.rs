//! Counts over time in at most 1,024 intervals, which double in width when there would be more.

/// The most intervals.
const MOST: usize = 1_024;

/// What was asked and refused, over time.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The width of an interval, in seconds.
    width: u64,
    /// The number of the first interval: its time divided by the width.
    first: u64,
    counts: Vec<(u64, u64)>,
}

impl Default for Timeline {
    fn default() -> Timeline {
        Timeline { width: 1, first: 0, counts: Vec::new() }
    }
}

impl Timeline {
    /// Counts a request at this second. Times do not decrease.
    #[inline]
    pub fn add(&mut self, second: u64, is_refused: bool) {
        if self.counts.is_empty() {
            self.first = second / self.width;
        }
        let mut index = second / self.width - self.first;
        while index >= MOST as u64 {
            self.widen();
            index = second / self.width - self.first;
        }
        let index = usize::try_from(index).expect("below the most");
        if index >= self.counts.len() {
            self.counts.resize(index + 1, (0, 0));
        }
        let (asked, refused) = &mut self.counts[index];
        *asked += 1;
        *refused += u64::from(is_refused);
    }

    #[cold]
    fn widen(&mut self) {
        let first = self.first / 2;
        let mut counts: Vec<(u64, u64)> = Vec::with_capacity(MOST);
        for (number, (asked, refused)) in (self.first..).zip(&self.counts) {
            let index = usize::try_from(number / 2 - first).expect("fewer than before");
            if index >= counts.len() {
                counts.push((0, 0));
            }
            counts[index].0 += asked;
            counts[index].1 += refused;
        }
        (self.width, self.first, self.counts) = (2 * self.width, first, counts);
    }

    /// The width of an interval, in seconds.
    pub fn width(&self) -> u64 {
        self.width
    }

    /// Each interval: when it begins, what was asked and what was refused.
    pub fn intervals(&self) -> impl ExactSizeIterator<Item = (u64, u64, u64)> + Clone {
        let (first, width) = (self.first, self.width);
        let interval = move |(index, (asked, refused)): (usize, &(u64, u64))| {
            ((first + u64::try_from(index).expect("few")) * width, *asked, *refused)
        };
        self.counts.iter().enumerate().map(interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_double_and_lose_nothing() {
        let mut timeline = Timeline::default();
        for second in 1_001..1_001 + 5_000u64 {
            timeline.add(second, second % 10 == 0);
        }
        let intervals: Vec<_> = timeline.intervals().collect();
        assert!(intervals.len() <= MOST && timeline.width() == 8, "{} {}", intervals.len(), timeline.width());
        assert_eq!(intervals.iter().map(|interval| interval.1).sum::<u64>(), 5_000);
        assert_eq!(intervals.iter().map(|interval| interval.2).sum::<u64>(), 500);
        assert_eq!(intervals[0], (1_000, 7, 0));
        assert!(intervals.windows(2).all(|pair| pair[1].0 == pair[0].0 + 8));
        assert_eq!(intervals[1], (1_008, 8, 1));
    }

    #[test]
    fn long_gap_is_bridged() {
        let mut timeline = Timeline::default();
        timeline.add(10, true);
        timeline.add(10_000_000_000, false);
        let total: u64 = timeline.intervals().map(|interval| interval.1).sum();
        assert_eq!((total, timeline.intervals().len() <= MOST), (2, true));
    }
}
