//! The process between the daemon and a model's command: this binary, started again. It ends when a pipe is closed,
//! which also happens if the daemon dies. Every orphaned process of the command becomes its child, and it kills all of
//! them before it exits.

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

/// The hidden subcommand of the supervisor: `__command <mode> <command> <reserved>…`. Standard input is the working
/// directory, standard output the command's output, standard error the pipe for the report. The reserved paths are the
/// daemon's own, which the command must not read.
pub const SUPERVISE_SUBCOMMAND: &str = "__command";
/// The hidden subcommand that becomes the command: `__confined <mode> <temporary folder> <command> <reserved>…`.
const EXEC_SUBCOMMAND: &str = "__confined";

/// Most bytes of a file that a command writes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// Most processes of the daemon's user, checked when a command starts one. The limit does not apply to root.
const MAX_PROCESSES: u64 = 4096;
/// Most open files of a process.
const MAX_OPEN_FILES: u64 = 1024;
/// Commands run at a lower CPU priority than the daemon.
const NICENESS: i32 = 5;
/// The interval between two rounds of killing.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Most files that the supervisor holds open while it removes the temporary folder.
const MAX_REMOVAL_HANDLES: u64 = 512;
/// Folders nested deeper than this are moved up before removal. Up to this depth a path stays within the system's
/// limit, whatever the names.
const MAX_LEVELS: usize = 12;

/// How a command is confined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Reaches only the files of the workdir, a temporary folder and the system, and no network.
    Sandboxed,
    /// As `Sandboxed`, but with network access.
    SandboxedWithNetwork,
    Unconfined,
}

impl Mode {
    const ALL: [Self; 3] = [
        Self::Sandboxed,
        Self::SandboxedWithNetwork,
        Self::Unconfined,
    ];

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

/// The running binary, even if its file has been replaced since.
pub fn current_binary() -> std::io::Result<PathBuf> {
    match cfg!(target_os = "linux") {
        true => Ok(PathBuf::from("/proc/self/exe")),
        false => std::env::current_exe(),
    }
}

/// Runs a hidden subcommand; `None` if the arguments are a user's.
pub fn run_subcommand(arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let arguments = supervisor_arguments(arguments)?;
    match arguments.as_slice() {
        [subcommand, mode, command, reserved @ ..] if subcommand == SUPERVISE_SUBCOMMAND => {
            let report = supervise_command(Mode::parse(mode)?, command, reserved);
            // If the daemon is gone, nobody reads the report.
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

/// All arguments, if the first one is a hidden subcommand.
fn supervisor_arguments(mut arguments: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let first = arguments.next()?;
    let is_ours = first == SUPERVISE_SUBCOMMAND || first == EXEC_SUBCOMMAND;
    is_ours.then(|| std::iter::once(first).chain(arguments).collect())
}

/// Runs the command to its end. Returns how it ended: `exit <code>`, `signal <number>`, or `failed <why>`.
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

/// Starts the process that becomes the command. The returned pipe closes when the command is executed; text in it
/// before says why that failed.
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
    // Leaves the daemon's session, so signals of its terminal do not arrive here. Fails if this process already leads a
    // session.
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

/// Waits for the command and kills what remains of it.
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

/// Returns when nobody reads the report any more: the call was dropped, or the daemon died.
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

/// Kills and reaps until no child is left. Orphans become children of this process, so then there is no descendant
/// either.
fn kill_all(command: Pid) {
    loop {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => {
                    // Orphans do not become our children on this system, so kill the process group.
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

/// Creates a folder below the system's temporary folder that only this user may enter.
fn create_temp_dir() -> std::io::Result<PathBuf> {
    let id = getrandom::u64().map_err(std::io::Error::other)?;
    let path = std::env::temp_dir().join(format!("axed-command-{id:016x}"));
    DirBuilder::new().mode(0o700).create(&path)?;
    path.canonicalize()
}

/// Removes the folder and its contents. No other process is left that could change it meanwhile.
fn remove_temp_dir(dir: &Path) {
    // Removal holds one file open for each level. A low limit makes it fail before the stack overflows.
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

/// Makes every folder below this one removable. Some tools create read-only folders; folders nested too deep for a path
/// are moved up.
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

/// Confines this process and executes the command in its place. Returns only on failure, with the reason.
fn exec_command(mode: Mode, temp_dir: &Path, command: &OsString, reserved: &[OsString]) -> String {
    let _ = rustix::process::setsid();
    let _ = rustix::process::nice(NICENESS);
    set_resource_limits();
    if let Err(why) = confine(mode, temp_dir, reserved) {
        return why;
    }
    // If the supervisor is killed, nobody else ends the command.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let error = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .exec();
    // The pipe may be closed by now, but the output is still open.
    anstream::eprintln!("/bin/sh cannot be executed: {error}");
    format!("/bin/sh cannot be executed: {error}")
}

/// Limits the command's resources. A limit that is already lower stays.
fn set_resource_limits() {
    // If memory runs out, the kernel kills a command before the daemon.
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
    let confined = match mode {
        Mode::Sandboxed => confine(temp_dir, false, reserved),
        Mode::SandboxedWithNetwork => confine(temp_dir, true, reserved),
        Mode::Unconfined => Ok(()),
    };
    confined.map_err(|error| error.to_string())
}

#[cfg(not(target_os = "linux"))]
fn confine(mode: Mode, _: &Path, _: &[OsString]) -> Result<(), String> {
    match mode {
        Mode::Unconfined => Ok(()),
        _ => Err("this system cannot confine commands".to_owned()),
    }
}
