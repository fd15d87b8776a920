//! TLS of connections, by `sslmode` and `sslrootcert` of the URL.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use rustls_platform_verifier::Verifier;
use url::form_urlencoded;

use crate::store::StoreError;

/// What a connection requires, as PostgreSQL's own clients do. A root is a file of certificates; without one the system's
/// certificates are those of all other connections of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsMode {
    Disable,
    /// TLS if the server has it, without a check of its certificate.
    Prefer,
    /// TLS. The certificate is checked only if there is a root.
    Require {
        root: Option<PathBuf>,
    },
    /// TLS with a certificate that an authority has signed, for any host.
    VerifyCa {
        root: Option<PathBuf>,
    },
    /// TLS with a certificate for the host.
    VerifyFull {
        root: Option<PathBuf>,
    },
}

/// Takes `sslmode` and `sslrootcert` out of a URL.
pub fn split_url(url: &str) -> Result<(String, TlsMode), StoreError> {
    let Some((base, query)) = url.split_once('?') else {
        return Ok((url.to_owned(), TlsMode::Prefer));
    };
    let (mut mode, mut root) = ("prefer".to_owned(), None);
    let mut rest = form_urlencoded::Serializer::new(String::new());
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "sslmode" => mode = value.into_owned(),
            "sslrootcert" => root = Some(PathBuf::from(value.into_owned())),
            _ => drop(rest.append_pair(&name, &value)),
        }
    }
    let mode = match mode.as_str() {
        "disable" => TlsMode::Disable,
        "prefer" => TlsMode::Prefer,
        "require" => TlsMode::Require { root },
        "verify-ca" => TlsMode::VerifyCa { root },
        "verify-full" => TlsMode::VerifyFull { root },
        _ => {
            return Err(StoreError::Backend(
                "has an sslmode that is none of disable, prefer, require, verify-ca and verify-full"
                    .to_owned(),
            ));
        }
    };
    // A form's space is a plus, which the client library does not read as one.
    let rest = rest.finish().replace('+', "%20");
    let separator = if rest.is_empty() { "" } else { "?" };
    Ok((format!("{base}{separator}{rest}"), mode))
}

pub fn client_config(mode: &TlsMode) -> Result<ClientConfig, StoreError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let (checks, root) = match mode {
        TlsMode::Disable | TlsMode::Prefer | TlsMode::Require { root: None } => {
            (Checks::Nothing, &None)
        }
        TlsMode::Require { root } | TlsMode::VerifyCa { root } => (Checks::Authority, root),
        TlsMode::VerifyFull { root } => (Checks::AuthorityAndHost, root),
    };
    let authority: Arc<dyn ServerCertVerifier> = match root {
        Some(path) => {
            let roots = Arc::new(read_roots(path)?);
            WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
                .build()
                .map_err(|error| tls_error(&error.to_string()))?
        }
        None => Arc::new(
            Verifier::new(Arc::clone(&provider)).map_err(|error| tls_error(&error.to_string()))?,
        ),
    };
    let verifier = Arc::new(CertificateCheck {
        checks,
        authority,
        provider: Arc::clone(&provider),
    });
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| tls_error(&error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth())
}

fn read_roots(path: &PathBuf) -> Result<RootCertStore, StoreError> {
    let error = |why: String| tls_error(&format!("sslrootcert {}: {why}", path.display()));
    let mut roots = RootCertStore::empty();
    let certificates =
        CertificateDer::pem_file_iter(path).map_err(|problem| error(problem.to_string()))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|problem| error(problem.to_string()))?;
        roots
            .add(certificate)
            .map_err(|problem| error(problem.to_string()))?;
    }
    if roots.is_empty() {
        return Err(error("has no certificate".to_owned()));
    }
    Ok(roots)
}

fn tls_error(why: &str) -> StoreError {
    StoreError::Backend(format!("asks for TLS that cannot be set up: {why}"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checks {
    Nothing,
    Authority,
    AuthorityAndHost,
}

/// Checks as much of a certificate as the mode requires.
#[derive(Debug)]
struct CertificateCheck {
    checks: Checks,
    authority: Arc<dyn ServerCertVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for CertificateCheck {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.checks == Checks::Nothing {
            return Ok(ServerCertVerified::assertion());
        }
        let verified = self.authority.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        match verified {
            // The name is compared last: the authority is right.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if self.checks == Checks::Authority => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::{TlsMode, split_url};

    #[test]
    fn the_mode_is_taken_out_of_the_url() {
        let split = |url| split_url(url).expect("a URL");
        let plain = "postgres://user@host/db";
        assert_eq!(split(plain), (plain.to_owned(), TlsMode::Prefer));
        let root = Some("/etc/ca.pem".into());
        assert_eq!(
            split("postgres://user@host/db?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem"),
            (plain.to_owned(), TlsMode::VerifyFull { root })
        );
        assert_eq!(
            split("postgres://user@/db?host=/run/a%20b&sslmode=require"),
            (
                "postgres://user@/db?host=%2Frun%2Fa%20b".to_owned(),
                TlsMode::Require { root: None }
            )
        );
        let error = split_url("postgres://u:secret@h/db?sslmode=yes").expect_err("no mode");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
