//! The alternatives of a glob with braces.

/// Maximum number of alternatives of one glob.
pub const MAX_ALTERNATIVES: usize = 256;

/// Expands the braces of a glob, whose alternatives may contain slashes; `None` if there are too many.
pub fn expand_braces(glob: &str) -> Option<Vec<String>> {
    let mut expanded = Vec::new();
    let mut pending = vec![glob.to_owned()];
    while let Some(glob) = pending.pop() {
        match first_brace(&glob) {
            Some((before, choices, after)) => {
                pending.extend(choices.iter().map(|it| format!("{before}{it}{after}")));
            }
            None => expanded.push(glob),
        }
        if pending.len() + expanded.len() > MAX_ALTERNATIVES {
            return None;
        }
    }
    Some(expanded)
}

/// The text before the first brace group, its choices, and the text after it.
fn first_brace(glob: &str) -> Option<(&str, Vec<&str>, &str)> {
    let mut start = None;
    let mut choice = 0;
    let mut choices = Vec::new();
    let mut depth = 0;
    let mut in_class = false;
    let mut chars = glob.char_indices();
    while let Some((index, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            // A bracket at the start of a class belongs to it.
            '[' if !in_class => {
                in_class = true;
                let rest = glob[index + 1..].trim_start_matches(['!', '^']);
                if rest.starts_with(']') {
                    while chars.next().is_some_and(|(_, c)| c != ']') {}
                }
            }
            ']' => in_class = false,
            _ if in_class => {}
            '{' => {
                depth += 1;
                if depth == 1 {
                    start = Some(index);
                    choice = index + 1;
                }
            }
            ',' if depth == 1 => {
                choices.push(&glob[choice..index]);
                choice = index + 1;
            }
            '}' if depth == 1 => {
                choices.push(&glob[choice..index]);
                return Some((&glob[..start?], choices, &glob[index + 1..]));
            }
            '}' if depth > 1 => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::expand_braces;

    #[test]
    fn braces_make_alternatives() {
        let mut expanded = expand_braces("a{b,{c,d}/e}f[{]").expect("few");
        expanded.sort();
        assert_eq!(expanded, ["abf[{]", "ac/ef[{]", "ad/ef[{]"]);
    }
}
