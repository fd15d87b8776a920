//! Has the linker place the functions that every daemon executes side by side, which deploy/link_order.ld lists: a daemon at rest
//! then has fewer pages of its file in memory. A linker that cannot do so links as it always does.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=deploy/link_order.ld");
    println!("cargo:rerun-if-env-changed=AXED_LINK_ORDER");
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    // A compiler that has counts of what was executed places the functions itself (deploy/optimized.sh).
    let has_counts = flags.contains("profile-generate") || flags.contains("profile-use");
    if variable("PROFILE") != "release" || has_counts || variable("AXED_LINK_ORDER") == "off" {
        return;
    }
    let script = Path::new(&variable("CARGO_MANIFEST_DIR")).join("deploy/link_order.ld");
    let argument = format!("-T{}", script.display());
    if variable("CARGO_CFG_TARGET_OS") == "linux" && can_link(&flags, &argument) {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}

/// Whether a program that does nothing can be linked with this argument.
fn can_link(flags: &str, argument: &str) -> bool {
    let folder = variable("OUT_DIR");
    let source = Path::new(&folder).join("nothing.rs");
    let program = Path::new(&folder).join("nothing");
    if fs::write(&source, "fn main() {}\n").is_err() {
        return false;
    }
    let mut compiler = Command::new(variable("RUSTC"));
    compiler.args([
        "--edition=2024",
        "--cap-lints=allow",
        "--target",
        &variable("TARGET"),
    ]);
    let linker = variable("RUSTC_LINKER");
    if !linker.is_empty() {
        compiler.arg(format!("-Clinker={linker}"));
    }
    // In the order of Cargo: the last linker wins.
    compiler
        .args(flags.split('\u{1f}').filter(|flag| !flag.is_empty()))
        .arg(format!("-Clink-arg={argument}"))
        .arg("-o")
        .args([&program, &source])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let is_linked = compiler.status().is_ok_and(|status| status.success());
    let _ = fs::remove_file(program);
    is_linked
}

/// A variable that Cargo sets, or nothing.
#[expect(
    clippy::disallowed_methods,
    reason = "Cargo speaks to build scripts so"
)]
fn variable(name: &str) -> String {
    env::var(name).unwrap_or_default()
}
