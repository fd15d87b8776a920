//! Makes the program smaller, in its file and in memory at rest. The linker packs the table of addresses that the start of the
//! program adjusts, and places the functions that every daemon executes side by side, which deploy/link_order.ld lists. A
//! linker that cannot do so links as it always does.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=deploy/link_order.ld");
    println!("cargo:rerun-if-env-changed=AXED_LINK_ORDER");
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    let is_off = variable("AXED_LINK_ORDER") == "off";
    let is_linux = variable("CARGO_CFG_TARGET_OS") == "linux";
    if variable("PROFILE") != "release" || !is_linux || is_off {
        return;
    }
    // The C library has to read the packed table. That of another machine may not.
    let is_for_here =
        variable("TARGET") == variable("HOST") && variable("CARGO_CFG_TARGET_ENV") == "gnu";
    if is_for_here && can_link(&flags, PACKED_RELOCATIONS, Use::Run) {
        println!("cargo:rustc-link-arg-bins={PACKED_RELOCATIONS}");
    }
    // A compiler that has counts of what was executed places the functions itself (deploy/optimized.sh).
    let has_counts = flags.contains("profile-generate") || flags.contains("profile-use");
    if has_counts {
        return;
    }
    let script = Path::new(&variable("CARGO_MANIFEST_DIR")).join("deploy/link_order.ld");
    let argument = format!("-T{}", script.display());
    if can_link(&flags, &argument, Use::Link) {
        println!("cargo:rustc-link-arg-bins={argument}");
    }
}

const PACKED_RELOCATIONS: &str = "-Wl,-z,pack-relative-relocs";

#[derive(PartialEq)]
enum Use {
    Link,
    Run,
}

/// Whether a program that does nothing can be linked with this argument, and be run if that is its use.
fn can_link(flags: &str, argument: &str, wanted: Use) -> bool {
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
    let succeeds = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let is_linked =
        succeeds(&mut compiler) && (wanted == Use::Link || succeeds(&mut Command::new(&program)));
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
