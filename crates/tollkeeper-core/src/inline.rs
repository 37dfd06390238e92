//! A list that is stored inline while it is short, and on the heap once it is longer.
//!
//! Most requests match only a few limits. Storing these inside the toll saves an allocation per check.

use core::fmt;
use core::ops::{Deref, DerefMut};

/// A list whose first `N` elements need no heap.
#[derive(Clone)]
pub struct Inline<T, const N: usize> {
    len: usize,
    /// All elements while there are at most `N`.
    inline: [T; N],
    /// All elements once there are more than `N`.
    heap: Vec<T>,
}

/// Shows the elements, and not what the array may hold behind the end: that may be of another request.
impl<T: fmt::Debug, const N: usize> fmt::Debug for Inline<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}

impl<T: Copy + Default, const N: usize> Default for Inline<T, N> {
    #[inline]
    fn default() -> Self {
        Inline { len: 0, inline: [T::default(); N], heap: Vec::new() }
    }
}

impl<T: Copy + Default, const N: usize> Inline<T, N> {
    /// The number of elements. The length of the slice takes longer, because that depends on where the elements are.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends one element.
    #[inline]
    pub fn push(&mut self, element: T) {
        match self.inline.get_mut(self.len) {
            Some(free) => {
                *free = element;
                self.len += 1;
            }
            None => self.extend_heap(&[element]),
        }
    }

    /// Appends several elements.
    #[inline(always)]
    pub fn extend_from_slice(&mut self, elements: &[T]) {
        let len = self.len + elements.len();
        match self.inline.get_mut(self.len..len) {
            Some(free) => {
                copy_short(elements, free);
                self.len = len;
            }
            None => self.extend_heap(elements),
        }
    }

    /// Appends the first `len` elements of an array. The others may be written behind the end.
    #[inline(always)]
    pub fn extend_from_array<const M: usize>(&mut self, elements: &[T; M], len: usize) {
        match self.inline[self.len.min(N)..].first_chunk_mut() {
            Some(free) if len <= M => {
                *free = *elements;
                self.len += len;
            }
            _ => self.extend_from_slice(&elements[..len]),
        }
    }

    /// Appends elements that do not fit inline.
    #[cold]
    fn extend_heap(&mut self, elements: &[T]) {
        if self.heap.is_empty() {
            self.heap.extend_from_slice(&self.inline[..self.len]);
        }
        self.heap.extend_from_slice(elements);
        self.len = self.heap.len();
    }

    /// Sets the length: truncates the list, or extends it with default values.
    #[inline(always)]
    pub fn resize(&mut self, len: usize) {
        if self.len <= len && len <= N {
            // The array may hold truncated elements behind the end.
            self.inline[self.len..len].fill(T::default());
            self.len = len;
            return;
        }
        self.truncate(len);
        while self.len < len {
            self.push(T::default());
        }
    }

    /// Whether it takes no heap.
    #[inline]
    pub fn is_inline(&self) -> bool {
        self.heap.capacity() == 0
    }

    /// Keeps only the first `len` elements.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        if self.len > N && len <= N {
            self.inline[..len].copy_from_slice(&self.heap[..len]);
            self.heap.clear();
        } else {
            self.heap.truncate(len);
        }
        self.len = self.len.min(len);
    }
}

/// Copies elements between slices of the same length. Up to 32 of them take two moves of a fixed length, which may
/// overlap: a call of `memcpy` takes longer than copying the value of a fact.
#[inline(always)]
fn copy_short<T: Copy>(from: &[T], to: &mut [T]) {
    #[inline(always)]
    fn ends<T: Copy, const N: usize>(from: &[T], to: &mut [T]) -> Option<()> {
        *to.first_chunk_mut::<N>()? = *from.first_chunk()?;
        *to.last_chunk_mut::<N>()? = *from.last_chunk()?;
        Some(())
    }
    let done = match from.len() {
        0..4 => None,
        4..=8 => ends::<T, 4>(from, to),
        9..=16 => ends::<T, 8>(from, to),
        17..=32 => ends::<T, 16>(from, to),
        _ => None,
    };
    if done.is_none() {
        to.copy_from_slice(from);
    }
}

impl<T, const N: usize> Deref for Inline<T, N> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        if self.len <= N { &self.inline[..self.len] } else { &self.heap }
    }
}

impl<T, const N: usize> DerefMut for Inline<T, N> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        if self.len <= N { &mut self.inline[..self.len] } else { &mut self.heap }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushed_elements_stay_in_order_at_every_length() {
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
    fn slices_of_every_length_are_appended_whole() {
        let bytes: Vec<u8> = (0..200).collect();
        for start in [0, 1, 7] {
            for len in 0..=100 {
                let mut list = Inline::<u8, 96>::default();
                list.extend_from_slice(&bytes[..start]);
                list.extend_from_slice(&bytes[start..start + len]);
                assert_eq!(*list, bytes[..start + len], "{len} after {start}");
            }
        }
    }

    #[test]
    fn parts_of_arrays_are_appended_at_every_length() {
        let bytes = *b"0123456789abcdef";
        for start in 0..120 {
            for len in 0..=16 {
                let mut list = Inline::<u8, 96>::default();
                list.extend_from_slice(&[7; 120][..start]);
                list.extend_from_array(&bytes, len);
                list.push(9);
                assert_eq!(*list, [&[7; 120][..start], &bytes[..len], &[9]].concat(), "{len} after {start}");
            }
        }
    }

    #[test]
    fn resize_extends_with_the_default() {
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
    fn truncate_keeps_the_first_elements() {
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
