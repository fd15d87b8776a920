//! A candidate becomes an agent's file: its text with `[rollout]` and `[gate]` of the file that it replaces.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::path::Path;

use jiff::Timestamp;

use crate::catalog::documents::Documents;
use crate::catalog::read::{AgentFile, read_with};
use crate::domain::agent::Agent;
use crate::settings::document;
use crate::settings::positions::Positions;
use crate::settings::section::{Audience, show_section};

/// The tables that the file keeps.
const KEPT: [&str; 2] = ["rollout", "gate"];

/// A candidate that is current for all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promoted {
    /// The version that it replaces.
    pub from: String,
    pub version: String,
    pub text: String,
    pub at: Timestamp,
    /// Files that changed after this time win.
    pub fixed_at: Option<Timestamp>,
}

/// By agent, the oldest first.
pub type Promotions = BTreeMap<String, Vec<Promoted>>;

/// What is in force of an agent whose file has this version, and last changed at this time; `None` if that is the file.
pub fn in_force<'p>(
    promotions: &'p [Promoted],
    file_version: &str,
    changed_at: Option<Timestamp>,
) -> Option<&'p Promoted> {
    let mut found: Option<&Promoted> = None;
    for promoted in promotions {
        let version = found.map_or(file_version, |it| &it.version);
        let is_newer = promoted
            .fixed_at
            .zip(changed_at)
            .is_some_and(|(fixed, changed)| changed > fixed);
        if promoted.from == version && !is_newer {
            found = Some(promoted);
        }
    }
    found
}

/// The text of the file that the candidate becomes.
///
/// # Errors
/// The tables cannot be separated from the rest, or a file is broken.
pub fn merge(
    (name, path): (&str, &Path),
    documents: &Documents,
    file: &str,
    candidate: &str,
) -> Result<(Agent, String), String> {
    let mut text = without_kept(candidate)?.trim_end().to_owned();
    for section in kept_sections(file)? {
        let section = file[section].trim();
        text.push_str("\n\n");
        text.push_str(section);
    }
    text.push('\n');
    let read = |text: &str| {
        let read = read_with(name, path, text.as_bytes(), documents);
        read.map_err(|invalid| invalid.error.to_string())
    };
    let settings = |file: &AgentFile| show_section(&file.agent.settings, Audience::Operator);
    let merged = read(&text)?;
    let (old, new) = (settings(&read(file)?), settings(&read(candidate)?));
    let is_as_expected = settings(&merged).iter().all(|(key, value)| {
        let source = if KEPT.contains(&key.as_str()) {
            &old
        } else {
            &new
        };
        source.get(key) == Some(value)
    });
    match is_as_expected {
        true => Ok((merged.agent, text)),
        false => Err("[rollout] and [gate] must be tables of their own in both files".to_owned()),
    }
}

fn without_kept(text: &str) -> Result<String, String> {
    let mut rest = String::new();
    let mut at = 0;
    for section in kept_sections(text)? {
        rest.push_str(&text[at..section.start]);
        at = section.end;
    }
    rest.push_str(&text[at..]);
    Ok(rest)
}

/// Where the kept tables are, each from the comments above its header to the next table's.
fn kept_sections(text: &str) -> Result<Vec<Range<usize>>, String> {
    let table = document::parse(text.as_bytes()).map_err(|_| "a file is no TOML".to_owned())?;
    let positions = Positions::of(&table);
    let mut starts = vec![0];
    starts.extend(text.match_indices('\n').map(|(at, _)| at + 1));
    let line = |number: usize| {
        let start = starts.get(number).copied().unwrap_or(text.len());
        let end = starts.get(number + 1).copied().unwrap_or(text.len());
        text[start..end].trim()
    };
    let mut sections = Vec::new();
    for key in KEPT {
        let Some(header) = positions.line(key) else {
            continue;
        };
        // Lines are counted from 1.
        let mut first = header - 1;
        let mut end = positions.last_line(key).unwrap_or(header);
        while end < starts.len() && !line(end).starts_with('[') {
            end += 1;
        }
        while end < starts.len() && end > header && line(end - 1).starts_with('#') {
            end -= 1;
        }
        while first > 0 && line(first - 1).starts_with('#') {
            first -= 1;
        }
        let start = starts[first];
        sections.push(start..starts.get(end).copied().unwrap_or(text.len()));
    }
    sections.sort_by_key(|section| section.start);
    Ok(sections)
}

/// Replaces a file, or what a link leads to, with a whole one.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let path = fs::canonicalize(path)?;
    let dir = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Agents' files do not begin with a dot.
    let new = dir.join(format!(".{name}.promoted"));
    let written = write_new(&path, &new, text);
    if written.is_err() {
        match fs::remove_file(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::debug!(error = %error, "{} stays: {error}", new.display());
            }
            _ => {}
        }
    }
    written
}

fn write_new(path: &Path, new: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::File::create(new)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(fs::metadata(path)?.permissions())?;
    file.sync_all()?;
    fs::rename(new, path)?;
    if let Some(dir) = path.parent() {
        fs::File::open(dir)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use jiff::{SignedDuration, Timestamp};

    use super::{Promoted, in_force};
    use crate::catalog::documents::Documents;

    fn merge(file: &str, candidate: &str) -> Result<String, String> {
        let named = ("a", Path::new("a.toml"));
        let merged = super::merge(named, &Documents::default(), file, candidate);
        merged.map(|(_, text)| text)
    }

    const FILE: &str = "name = \"a\"\nmodel = \"p/old\"\n\n# Ten of a hundred.\n[rollout]\ncandidate = \"a.next.toml\"\nscorers = [\n  \"s\",\n]\n\n\
         # Assertions.\n[[scorers]]\nname = \"s\"\nkind = \"assert\"\nexpect = { contains = \"x\" }\n\n[gate]\ndataset = \"release\"\n";

    #[test]
    fn the_candidate_keeps_the_tables_of_the_file() {
        let candidate = FILE
            .replace("p/old", "p/new")
            .replace("a.next.toml", "a.other.toml")
            .replace("\"release\"", "\"other\"");
        let merged = merge(FILE, &candidate).expect("a text");
        assert_eq!(
            merged,
            "name = \"a\"\nmodel = \"p/new\"\n\n# Assertions.\n[[scorers]]\nname = \"s\"\nkind = \"assert\"\n\
             expect = { contains = \"x\" }\n\n# Ten of a hundred.\n[rollout]\ncandidate = \"a.next.toml\"\nscorers = [\n  \"s\",\n]\n\n\
             [gate]\ndataset = \"release\"\n"
        );
        let bare = "name = \"a\"\nmodel = \"p/new\"\nsystem_prompt = \"\"\"\n[rollout]\n\"\"\"\n\
            [[scorers]]\nname = \"s\"\nkind = \"assert\"\nexpect = { contains = \"x\" }\n";
        let merged = merge(FILE, bare).expect("a text");
        assert!(
            merged.starts_with(bare) && merged.ends_with("[gate]\ndataset = \"release\"\n"),
            "{merged}"
        );
        let inline = bare.replace(
            "p/new\"\n",
            "p/new\"\nrollout = { candidate = \"b.toml\" }\n",
        );
        assert!(merge(FILE, &inline).is_err());
    }

    #[test]
    fn promotions_follow_each_other_until_the_file_changes() {
        let start = Timestamp::UNIX_EPOCH;
        let later = |hours| start + SignedDuration::from_hours(hours);
        let promoted = |from: &str, version: &str, hours| Promoted {
            from: from.to_owned(),
            version: version.to_owned(),
            text: String::new(),
            at: later(hours),
            fixed_at: None,
        };
        let mut all = vec![
            promoted("1", "2", 1),
            promoted("2", "1", 2),
            promoted("1", "3", 3),
        ];
        let version = |all: &[Promoted], file: &str, changed| {
            in_force(all, file, Some(changed)).map(|it| it.version.clone())
        };
        assert_eq!(version(&all, "1", start).as_deref(), Some("3"));
        assert_eq!(version(&all, "3", start), None);
        assert_eq!(version(&all[..2], "1", start).as_deref(), Some("1"));
        all[0].fixed_at = Some(later(1));
        all[2].fixed_at = Some(later(4));
        assert_eq!(version(&all, "1", start).as_deref(), Some("3"));
        assert_eq!(version(&all, "1", later(5)), None);
    }
}
