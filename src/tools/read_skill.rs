//! `read_skill`: reads the instructions of a skill, and the files beside them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use futures_util::future::BoxFuture;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::domain::json_schema::Schema;
use crate::domain::message::{ToolCall, ToolSpec, shorten};
use crate::domain::skill::{READ_SKILL, SKILL_FILE, Skill};
use crate::tools::StaticSpec;
use crate::tools::{CallContext, Effect, Tool, ToolOutput};
use crate::workdirs::registry::Workdirs;
use crate::workdirs::skill_dir::SkillDir;

const DESCRIPTION: &str = "Read a skill: without a path its instructions and the names of its files, with a path one of these files. \
                     Paths in the instructions are relative to the skill. The files are not in the working directory.";

static SPEC: LazyLock<StaticSpec> =
    LazyLock::new(|| StaticSpec::new::<Arguments>(READ_SKILL, DESCRIPTION));

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Arguments {
    /// The name of the skill.
    skill: String,
    /// A file of the skill, such as "references/forms.md"; without it the instructions.
    #[serde(default)]
    path: Option<String>,
    /// The number of the first line; the first line is 1.
    #[serde(default = "default_offset")]
    #[schemars(range(min = 1))]
    offset: usize,
    /// How many lines to read at most.
    #[serde(default = "default_limit")]
    #[schemars(range(min = 1))]
    limit: usize,
}

fn default_offset() -> usize {
    1
}

fn default_limit() -> usize {
    2000
}

/// The skills of one agent.
pub struct ReadSkill {
    /// The names and directories.
    skills: Vec<(String, PathBuf)>,
    workdirs: Arc<Workdirs>,
}

impl ReadSkill {
    pub fn new(skills: Vec<(String, PathBuf)>, workdirs: Arc<Workdirs>) -> Self {
        Self { skills, workdirs }
    }

    fn dir(&self, name: &str) -> Result<PathBuf, String> {
        let found = self.skills.iter().find(|(known, _)| known == name);
        found.map(|(_, dir)| dir.clone()).ok_or_else(|| {
            let names: Vec<&str> = self.skills.iter().map(|(name, _)| name.as_str()).collect();
            let (name, names) = (shorten(name, 100), names.join(", "));
            format!("There is no skill \"{name}\"; the skills are: {names}")
        })
    }
}

impl Tool for ReadSkill {
    fn spec(&self) -> ToolSpec {
        SPEC.to_spec()
    }

    fn effect(&self) -> Effect {
        Effect::ReadOnly
    }

    fn schema(&self) -> Option<&Schema> {
        SPEC.schema.as_ref()
    }

    fn call<'a>(
        &'a self,
        call: &'a ToolCall,
        _context: CallContext<'a>,
    ) -> BoxFuture<'a, Result<ToolOutput, String>> {
        Box::pin(async move {
            let arguments: Arguments = call.parse_arguments()?;
            let dir = self.dir(&arguments.skill)?;
            let workdirs = Arc::clone(&self.workdirs);
            let read = tokio::task::spawn_blocking(move || read(&arguments, &dir, &workdirs));
            let read = read.await.map_err(|_| "The skill could not be read")?;
            read.map(ToolOutput::from)
        })
    }
}

fn read(arguments: &Arguments, dir: &Path, workdirs: &Workdirs) -> Result<String, String> {
    let name = &arguments.skill;
    // The model does not know the directory.
    let dir = SkillDir::open(dir, workdirs)
        .map_err(|error| format!("The skill {name} could not be opened: {}", error.kind()))?;
    let path = arguments.path.as_deref().map(str::trim).unwrap_or_default();
    if !matches!(path, "" | "." | SKILL_FILE) {
        let text = dir.read(Path::new(path));
        let text = text.map_err(|why| {
            let files = dir.files().join(", ");
            let path = shorten(path, 200);
            format!("The file \"{path}\" of the skill {name} {why}; its files are: {files}")
        })?;
        return lines(&text, arguments);
    }
    let text = dir.read(Path::new(SKILL_FILE));
    let text = text.map_err(|why| format!("The {SKILL_FILE} of {name} {why}"))?;
    let skill =
        Skill::parse(name, &text).map_err(|why| format!("The {SKILL_FILE} of {name}:{why}"))?;
    let mut output = lines(skill.body, arguments)?;
    let mut files = dir.files();
    files.retain(|file| file != SKILL_FILE);
    if !files.is_empty() {
        output.push_str(&format!("\n\nFiles of this skill:\n{}", files.join("\n")));
    }
    Ok(output)
}

/// The requested lines.
fn lines(text: &str, arguments: &Arguments) -> Result<String, String> {
    if text.trim().is_empty() {
        return Ok("(empty)".to_owned());
    }
    let Arguments { offset, limit, .. } = arguments;
    let count = text.lines().count();
    let skipped = offset.saturating_sub(1);
    if skipped >= count {
        return Err(format!(
            "It has only {count} lines; offset {offset} is behind its end"
        ));
    }
    let shown: Vec<&str> = text.lines().skip(skipped).take(*limit).collect();
    let end = skipped + shown.len();
    let mut shown = shown.join("\n");
    if end < count {
        shown.push_str(&format!(
            "\n... (more follows; continue with offset {})",
            end + 1
        ));
    }
    Ok(shown)
}
