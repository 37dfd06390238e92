//! A short list that lives where it stands.
//!
//! A request meets a handful of limits. Keeping them in the toll itself, and going to the heap only
//! for more, saves every check an allocation.

use core::ops::{Deref, DerefMut};

/// A list whose first `N` elements need no heap.
#[derive(Clone, Debug)]
pub struct Inline<T, const N: usize> {
    len: usize,
    here: [T; N],
    heap: Vec<T>,
}

impl<T: Copy + Default, const N: usize> Default for Inline<T, N> {
    #[inline]
    fn default() -> Self {
        Inline { len: 0, here: [T::default(); N], heap: Vec::new() }
    }
}

impl<T: Copy + Default, const N: usize> Inline<T, N> {
    /// Appends one element.
    #[inline]
    pub fn push(&mut self, element: T) {
        match self.here.get_mut(self.len) {
            Some(place) => {
                *place = element;
                self.len += 1;
            }
            None => self.extend_from_slice(&[element]),
        }
    }

    /// Appends several elements.
    #[inline]
    pub fn extend_from_slice(&mut self, elements: &[T]) {
        let len = self.len + elements.len();
        if len <= N {
            self.here[self.len..len].copy_from_slice(elements);
        } else {
            if self.heap.is_empty() {
                self.heap.extend_from_slice(&self.here[..self.len]);
            }
            self.heap.extend_from_slice(elements);
        }
        self.len = len;
    }

    /// Makes the list `len` long: what is more is cut off, what is missing is the default.
    #[inline]
    pub fn resize(&mut self, len: usize) {
        if self.len <= len && len <= N {
            // What lies behind the end is left over from what was cut off.
            self.here[self.len..len].fill(T::default());
            self.len = len;
            return;
        }
        self.truncate(len);
        while self.len < len {
            self.push(T::default());
        }
    }

    /// Keeps only the first `len` elements.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        if self.len > N && len <= N {
            self.here[..len].copy_from_slice(&self.heap[..len]);
            self.heap.clear();
        } else {
            self.heap.truncate(len);
        }
        self.len = self.len.min(len);
    }
}

impl<T, const N: usize> Deref for Inline<T, N> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        if self.len <= N { &self.here[..self.len] } else { &self.heap }
    }
}

impl<T, const N: usize> DerefMut for Inline<T, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        if self.len <= N { &mut self.here[..self.len] } else { &mut self.heap }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_list_that_was_pushed_whatever_its_length() {
        let mut list = Inline::<u32, 4>::default();
        for len in 0..20 {
            assert_eq!(*list, (0..len).collect::<Vec<_>>());
            list.push(len);
            list[0] = 0;
        }
        list.extend_from_slice(&[20, 21]);
        assert_eq!(*list, (0..22).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_missing_is_the_default() {
        let mut list = Inline::<u32, 4>::default();
        (1..=4).for_each(|element| list.push(element));
        list.truncate(1);
        for (len, expected) in
            [(3, &[1, 0, 0][..]), (2, &[1, 0]), (6, &[1, 0, 0, 0, 0, 0]), (4, &[1, 0, 0, 0]), (0, &[])]
        {
            list.resize(len);
            assert_eq!(*list, *expected);
        }
    }

    #[test]
    fn what_is_cut_off_is_gone_and_the_rest_stays() {
        for (len, rest) in [(0, 0), (3, 5), (3, 2), (4, 4), (9, 7), (9, 4), (9, 3), (9, 0)] {
            let mut list = Inline::<u32, 4>::default();
            (0..len).for_each(|element| list.push(element));
            list.iter_mut().for_each(|element| *element += 1);
            list.truncate(rest);
            let kept = u32::try_from(rest).expect("small").min(len);
            assert_eq!(*list, (1..=kept).collect::<Vec<_>>(), "{rest} of {len}");
            (0..9).for_each(|element| list.push(element));
            assert_eq!(*list, (1..=kept).chain(0..9).collect::<Vec<_>>(), "{rest} of {len}, and more");
        }
    }
}
