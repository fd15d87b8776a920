//! What stands between the daemon and a model's command: this binary, started again. The supervisor is told to end by
//! the end of a pipe, so also by the daemon's death; every process that the command starts, however it hides, becomes
//! its child in the end, and none is left when it goes. Knows no daemon, no run and no configuration.

use std::ffi::OsString;
use std::fs::{DirBuilder, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, WaitStatus};

use crate::tools::shell::process_tree;

/// The hidden subcommand that supervises: `__command <mode> <command> <reserved>…`, with the working directory as its
/// input, the command's output as its output, and the report on the pipe that is its standard error. What is reserved are
/// paths of the daemon's own that the command must not read.
pub const SUPERVISE_SUBCOMMAND: &str = "__command";
/// The one that becomes the command: `__confined <mode> <temporary folder> <command> <reserved>…`.
const EXEC_SUBCOMMAND: &str = "__confined";

/// Most bytes of a file that a command writes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most processes of the daemon's user, when one more is started by a command. (Root has no such bound.)
const MAX_PROCESSES: u64 = 4096;
/// Most open files of a process.
const MAX_OPEN_FILES: u64 = 1024;
/// How much less of the processors commands get than the daemon.
const NICENESS: i32 = 5;
/// A look at what is left, and the next.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Files that the supervisor may hold open while it removes the temporary folder.
const MAX_REMOVAL_HANDLES: u64 = 512;
/// Levels of folders below the temporary one of which a path can be made, whatever they are named.
const MAX_LEVELS: usize = 12;

/// How a command is kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No file but those of the workdir, a temporary folder and the system, and no network.
    Sandboxed,
    /// The same, with the network.
    SandboxedWithNetwork,
    /// Not at all.
    Unconfined,
}

impl Mode {
    const ALL: [Self; 3] = [
        Self::Sandboxed,
        Self::SandboxedWithNetwork,
        Self::Unconfined,
    ];

    /// As an argument.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sandboxed => "confined",
            Self::SandboxedWithNetwork => "networked",
            Self::Unconfined => "unconfined",
        }
    }

    fn parse(text: &OsString) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| text == mode.as_str())
    }
}

/// This binary as it runs, also where its file was replaced since.
pub fn current_binary() -> std::io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => std::env::current_exe(),
    }
}

/// Does what these arguments ask for, where they are the daemon's and not a user's.
pub fn run_subcommand(arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let arguments = supervisor_arguments(arguments)?;
    match arguments.as_slice() {
        [subcommand, mode, command, reserved @ ..] if subcommand == SUPERVISE_SUBCOMMAND => {
            let report = supervise_command(Mode::parse(mode)?, command, reserved);
            // Where the daemon has gone, nobody is left to tell.
            let _ = std::io::stderr().write_all(report.as_bytes());
            Some(ExitCode::SUCCESS)
        }
        [subcommand, mode, temp_dir, command, reserved @ ..] if subcommand == EXEC_SUBCOMMAND => {
            let error = exec_command(Mode::parse(mode)?, Path::new(temp_dir), command, reserved);
            let pipe = std::io::stdin().as_fd().try_clone_to_owned();
            let _ = pipe.map(|pipe| std::fs::File::from(pipe).write_all(error.as_bytes()));
            Some(ExitCode::FAILURE)
        }
        _ => None,
    }
}

/// All arguments, where the first one is a subcommand of ours.
fn supervisor_arguments(mut arguments: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let first = arguments.next()?;
    let is_ours = first == SUPERVISE_SUBCOMMAND || first == EXEC_SUBCOMMAND;
    is_ours.then(|| std::iter::once(first).chain(arguments).collect())
}

/// Runs the command to its end and returns how it ended: `exit <code>`, `signal <number>`, or `failed <why>`.
fn supervise_command(mode: Mode, command: &OsString, reserved: &[OsString]) -> String {
    let temp_dir = match create_temp_dir() {
        Ok(temp_dir) => temp_dir,
        Err(error) => return format!("failed its temporary folder cannot be made: {error}"),
    };
    let report = spawn_command(mode, &temp_dir, command, reserved)
        .and_then(|(child, error_pipe)| wait_and_reap(&child, error_pipe));
    remove_temp_dir(&temp_dir);
    report.unwrap_or_else(|why| format!("failed {why}"))
}

/// Starts the process that becomes the command. The pipe ends when it has; what comes out of it before is why not.
fn spawn_command(
    mode: Mode,
    temp_dir: &Path,
    command: &OsString,
    reserved: &[OsString],
) -> Result<(Child, std::io::PipeReader), String> {
    let failed = |error: std::io::Error| format!("it cannot be started: {error}");
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| failed(error.into()))?;
    // Out of the daemon's session: what its terminal sends is not for us. Fails where we are in one of our own.
    let _ = rustix::process::setsid();
    rustix::process::fchdir(std::io::stdin())
        .map_err(|error| format!("the workdir cannot be entered: {error}"))?;
    let (error_pipe, pipe) = std::io::pipe().map_err(failed)?;
    let output = std::io::stdout().as_fd().try_clone_to_owned();
    let child = Command::new(current_binary().map_err(failed)?)
        .arg0("axed")
        .args([EXEC_SUBCOMMAND, mode.as_str()])
        .arg(temp_dir)
        .arg(command)
        .args(reserved)
        .env("HOME", temp_dir)
        .env("TMPDIR", temp_dir)
        .stdin(Stdio::from(pipe))
        .stderr(Stdio::from(output.map_err(failed)?))
        .spawn();
    Ok((child.map_err(failed)?, error_pipe))
}

/// Waits for the command and leaves nothing of it.
fn wait_and_reap(child: &Child, mut error_pipe: std::io::PipeReader) -> Result<String, String> {
    let pid = Pid::from_child(child);
    std::thread::spawn(move || {
        wait_for_reader_hangup();
        loop {
            process_tree::kill(pid);
            std::thread::sleep(POLL_INTERVAL);
        }
    });
    let mut error_text = String::new();
    let _ = error_pipe
        .by_ref()
        .take(4096)
        .read_to_string(&mut error_text);
    let status = loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended_pid, status))) if ended_pid == pid => break Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => break Err(format!("it cannot be waited for: {error}")),
        }
    };
    kill_all(pid);
    match (error_text.is_empty(), status?) {
        (false, _) => Err(error_text),
        (true, status) => Ok(describe_status(status)),
    }
}

fn describe_status(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "failed it ended in an unknown way".to_owned(),
    }
}

/// Comes back when nobody reads our report any more: the call was dropped, or the daemon is dead.
fn wait_for_reader_hangup() {
    let report = std::io::stderr();
    loop {
        let mut fds = [PollFd::new(&report, PollFlags::empty())];
        match poll(&mut fds, None) {
            Ok(_) if !fds[0].revents().is_empty() => return,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Kills and buries until there is no child any more. Whoever loses its parent becomes our child, so then there is no
/// descendant either.
fn kill_all(command: Pid) {
    loop {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // Where orphans are not given to us, the group is what we know.
                    #[cfg(not(target_os = "linux"))]
                    process_tree::kill(command);
                    return;
                }
            }
        }
        process_tree::kill(command);
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A new folder that only this user may enter, below the system's temporary one.
fn create_temp_dir() -> std::io::Result<PathBuf> {
    let id = getrandom::u64().map_err(std::io::Error::other)?;
    let path = std::env::temp_dir().join(format!("axed-command-{id:016x}"));
    DirBuilder::new().mode(0o700).create(&path)?;
    path.canonicalize()
}

/// Removes the folder with all in it. Nobody is left to put something in its place meanwhile.
fn remove_temp_dir(dir: &Path) {
    // Removing holds a file open for each level. Where there are too many it fails before the stack is full.
    let current = rustix::process::getrlimit(Resource::Nofile);
    let lowered = Rlimit {
        current: Some(
            current
                .current
                .map_or(MAX_REMOVAL_HANDLES, |now| now.min(MAX_REMOVAL_HANDLES)),
        ),
        ..current
    };
    let _ = rustix::process::setrlimit(Resource::Nofile, lowered);
    if std::fs::remove_dir_all(dir).is_err() {
        flatten_dir(dir);
        let _ = std::fs::remove_dir_all(dir);
    }
}

/// Makes every folder below this one removable: tools make some in which nothing can be removed, and what is nested
/// deeper than a path can say is brought up.
fn flatten_dir(dir: &Path) {
    let _ = std::fs::set_permissions(dir, Permissions::from_mode(0o700));
    let Ok(id) = getrandom::u64() else { return };
    // A name that the command cannot have used.
    let hoist_dir = dir.join(format!("{id:016x}"));
    let mut next = subdirectories(dir);
    if std::fs::create_dir(&hoist_dir).is_err() {
        return;
    }
    let mut hoisted = 0_u64;
    while let Some(path) = next.pop() {
        let _ = std::fs::set_permissions(&path, Permissions::from_mode(0o700));
        let levels = path
            .strip_prefix(dir)
            .map_or(0, |relative| relative.iter().count());
        if levels < MAX_LEVELS {
            next.extend(subdirectories(&path));
            continue;
        }
        hoisted += 1;
        let target = hoist_dir.join(hoisted.to_string());
        if std::fs::rename(&path, &target).is_ok() {
            next.extend(subdirectories(&target));
        }
    }
}

fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let subdirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    subdirs.map(|entry| entry.path()).collect()
}

/// Confines this process and executes the command in its place. Comes back only with the reason why not.
fn exec_command(mode: Mode, temp_dir: &Path, command: &OsString, reserved: &[OsString]) -> String {
    let _ = rustix::process::setsid();
    let _ = rustix::process::nice(NICENESS);
    set_resource_limits();
    if let Err(why) = confine(mode, temp_dir, reserved) {
        return why;
    }
    // Should the supervisor be killed: nobody else would end the command.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let error = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .exec();
    // The pipe may be gone by now, the output is not.
    anstream::eprintln!("/bin/sh cannot be executed: {error}");
    format!("/bin/sh cannot be executed: {error}")
}

/// Bounds what the command may use. A bound that is lower already stays.
fn set_resource_limits() {
    // Where memory runs out, a command goes before the daemon.
    let _ = std::fs::write("/proc/self/oom_score_adj", "500");
    for (resource, max) in [
        (Resource::Core, 0),
        (Resource::Fsize, MAX_FILE_BYTES),
        (Resource::Nproc, MAX_PROCESSES),
        (Resource::Nofile, MAX_OPEN_FILES),
    ] {
        let lowered = |now: Option<u64>| Some(now.map_or(max, |now| now.min(max)));
        let current = rustix::process::getrlimit(resource);
        let limit = Rlimit {
            current: lowered(current.current),
            maximum: lowered(current.maximum),
        };
        let _ = rustix::process::setrlimit(resource, limit);
    }
}

#[cfg(target_os = "linux")]
fn confine(mode: Mode, temp_dir: &Path, reserved: &[OsString]) -> Result<(), String> {
    use crate::tools::shell::sandbox::confine;

    let reserved: Vec<PathBuf> = reserved.iter().map(PathBuf::from).collect();
    match mode {
        Mode::Sandboxed => confine(temp_dir, false, reserved),
        Mode::SandboxedWithNetwork => confine(temp_dir, true, reserved),
        Mode::Unconfined => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
fn confine(mode: Mode, _: &Path, _: &[OsString]) -> Result<(), String> {
    match mode {
        Mode::Unconfined => Ok(()),
        _ => Err("this system cannot confine commands".to_owned()),
    }
}
