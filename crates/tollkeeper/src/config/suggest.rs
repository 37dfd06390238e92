//! Finds the known word that a misspelled word probably means.

/// The known word with the smallest edit distance, if it is small enough to be a misspelling.
pub(super) fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    // All known words are short, and the distance to a very long word takes quadratic time.
    const LONGEST: usize = 64;
    if word.is_empty() || word.len() > LONGEST {
        return None;
    }
    let folded = |text: &str| text.to_lowercase().replace(['-', ' '], "_");
    let word = folded(word);
    let known: Vec<&str> = known.into_iter().collect();
    let rated = known.iter().copied().map(|known| (distance(&word, &folded(known)), known));
    let (distance, nearby) = rated.min_by_key(|(distance, _)| *distance)?;
    let near = match word.chars().count() {
        0..=3 => 1,
        4..=7 => 2,
        _ => 3,
    };
    if distance <= near && distance < nearby.chars().count() {
        return Some(nearby);
    }
    // `allowlist` is not close to `allow`, but begins with it.
    let begins = |known: &&str| {
        known.len() >= 4
            && word.len() >= 4
            && (word.starts_with(&folded(known)) || folded(known).starts_with(&word))
    };
    known.into_iter().find(begins)
}

/// The edit distance: characters changed, inserted, deleted or swapped with their neighbour.
fn distance(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut rows = vec![vec![0; to.len() + 1]; from.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=from.len() {
        for j in 1..=to.len() {
            let same = usize::from(from[i - 1] != to[j - 1]);
            let mut best = (rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(rows[i - 1][j - 1] + same);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelled_word_finds_the_known_word() {
        let known = ["name", "by", "rate", "burst", "algorithm", "default_tier", "on_store_failure"];
        for (word, expected) in [
            ("brust", Some("burst")),
            ("Rate", Some("rate")),
            ("rates", Some("rate")),
            ("default-tier", Some("default_tier")),
            ("on_store_fail", Some("on_store_failure")),
            ("on_store_falure", Some("on_store_failure")),
            ("algoritm", Some("algorithm")),
            ("xy", Some("by")),
            ("burst_size", Some("burst")),
            ("algo", Some("algorithm")),
            ("zz", None),
            ("", None),
            ("completely_different", None),
        ] {
            assert_eq!(nearest(word, known), expected, "{word}");
        }
        assert_eq!(nearest(&"burst".repeat(100_000), known), None);
    }
}
