//! `[[http_tools]]` with `openapi`, against a service of our own on this machine that also serves documents.

use std::sync::{Arc, Mutex};

use axed::domain::openapi::document::Document;
use axed::domain::openapi::operation;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::support::app::{Setup, TestApp};
use crate::support::within_timeout;
use crate::tools::call_results::call_results;

/// A document whose server is HOST.
const PETS: &str = r##"openapi: 3.0.3
info: { title: Pets, version: "1" }
servers:
- url: HOST/{version}
  variables: { version: { default: v1 } }
paths:
  /pets:
    parameters:
    - { name: X-Trace, in: header, schema: { type: string } }
    - { name: Authorization, in: header, required: true, schema: { type: string } }
    get:
      operationId: listPets
      summary: Lists pets
      parameters:
      - { name: tag, in: query, schema: { type: array, items: { type: string } } }
      - { name: limit, in: query, description: The most pets., schema: { type: integer, maximum: 100 } }
    post:
      operationId: pets__create
      requestBody:
        required: true
        content:
          application/json:
            schema: { $ref: "#/components/schemas/Pet" }
  /pets/{petId}:
    get:
      parameters:
      - $ref: "#/components/parameters/PetId"
components:
  parameters:
    PetId: { name: petId, in: path, required: true, schema: { type: string } }
  schemas:
    Pet:
      type: object
      required: [id, name]
      properties:
        id: { type: integer, readOnly: true }
        name: { type: string, nullable: true, example: Rex }
        parent: { $ref: "#/components/schemas/Pet" }
"##;

type Seen = Arc<Mutex<Vec<(Method, Uri, HeaderMap, Bytes)>>>;
/// The document at `/openapi`, and its status.
type Served = Arc<Mutex<(StatusCode, String)>>;

struct Service {
    address: String,
    seen: Seen,
    document: Served,
    _server: JoinSet<()>,
}

impl Service {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let seen = Seen::default();
        let text = PETS.replace("HOST", &address);
        let document = Arc::new(Mutex::new((StatusCode::OK, text)));
        let state = (Arc::clone(&seen), Arc::clone(&document));
        let routes = Router::new().fallback(respond).with_state(state);
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, routes).await.expect("serve") });
        Self {
            address,
            seen,
            document,
            _server: server,
        }
    }

    fn document(&self) -> String {
        self.document.lock().expect("a lock").1.clone()
    }

    fn set_document(&self, status: StatusCode, text: &str) {
        *self.document.lock().expect("a lock") = (status, text.to_owned());
    }

    /// The method, the address and the body of each call.
    fn calls(&self) -> Vec<String> {
        let seen = self.seen.lock().expect("a lock");
        let line = |(method, uri, _, body): &(Method, Uri, HeaderMap, Bytes)| {
            format!("{method} {uri} {}", String::from_utf8_lossy(body))
        };
        seen.iter().map(line).collect()
    }

    fn header(&self, at: usize, name: &str) -> String {
        let seen = self.seen.lock().expect("a lock");
        let value = seen[at].2.get(name).expect("a header");
        value.to_str().expect("text").to_owned()
    }

    fn setup(&self) -> Setup {
        TestApp::setup()
            .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
            .environment("PETS_TOKEN", "token-of-pets")
            .file("agents/pets.yaml", &self.document())
    }
}

async fn respond(
    State((seen, document)): State<(Seen, Served)>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if uri.path() == "/openapi" {
        let (status, text) = document.lock().expect("a lock").clone();
        return (status, [("location", "http://10.0.0.1/")], text).into_response();
    }
    seen.lock()
        .expect("a lock")
        .push((method, uri.clone(), headers, body));
    match uri.path() {
        "/v1/pets/moved" => (StatusCode::FOUND, [("location", "http://10.0.0.1/")]).into_response(),
        "/v1/pets/huge" => "x".repeat(2 << 20).into_response(),
        _ => "found".into_response(),
    }
}

fn table(source: &str, operations: &str) -> String {
    format!(
        "[[http_tools]]\nopenapi = \"{source}\"\noperations = {operations}\n\
         headers = {{ Authorization = \"Bearer ${{PETS_TOKEN}}\" }}\n"
    )
}

#[tokio::test]
async fn operations_of_a_document_are_tools() {
    let service = Service::start().await;
    let operations = r#"["listPets", "pets__create", "GET /pets/{petId}"]"#;
    let app = service
        .setup()
        .agent("worker", &table("pets.yaml", operations))
        .spawn()
        .await;
    let by_id = |id: &str| ("get_pets_petId", json!({ "petId": id }));
    let (list, create) = ("listPets", "pets_create");
    let results = call_results(
        &app,
        &[
            (
                list,
                json!({ "tag": ["a&b", "c"], "limit": 5, "X-Trace": "t" }),
            ),
            (list, json!({})),
            (
                create,
                json!({ "body": { "name": null, "parent": { "name": "Rex" } } }),
            ),
            by_id("..x/?y#z"),
            by_id("%41"),
            by_id(".."),
            by_id("moved"),
            by_id("huge"),
            (list, json!({ "limit": 5.0 })),
            (list, json!({ "limit": 500 })),
            (list, json!({ "X-Trace": "a\r\nb" })),
            (create, json!({ "body": {} })),
        ],
    )
    .await;
    assert_eq!(
        service.calls(),
        [
            "GET /v1/pets?tag=a%26b&tag=c&limit=5 ",
            "GET /v1/pets ",
            r#"POST /v1/pets {"name":null,"parent":{"name":"Rex"}}"#,
            "GET /v1/pets/..x%2F%3Fy%23z ",
            "GET /v1/pets/%2541 ",
            "GET /v1/pets/moved ",
            "GET /v1/pets/huge ",
            "GET /v1/pets?limit=5 ",
        ]
    );
    assert_eq!(service.header(0, "x-trace"), "t");
    assert_eq!(service.header(0, "authorization"), "Bearer token-of-pets");
    assert_eq!(service.header(2, "content-type"), "application/json");
    assert_eq!(results[..5], ["found"; 5]);
    for (at, expected) in [
        (5, "error: An argument makes \".\" or \"..\""),
        (6, "a redirect, which is not followed"),
        (7, "cut: this is the beginning of a longer response"),
        (8, "found"),
        (9, "do not fit its schema"),
        (10, "characters that no header has"),
        (11, "do not fit its schema"),
    ] {
        assert!(results[at].contains(expected), "{}", results[at]);
    }
    let offered = app.provider.requests().remove(0).tool_names();
    assert_eq!(offered, [list, create, "get_pets_petId"]);
    let shown = app.get("/agents/worker").await;
    let first = &shown.json()["http_tools"][0];
    assert_eq!(first["openapi"], "pets.yaml", "{first}");
    let shown = shown.text;
    assert!(shown.contains("Lists pets"), "{shown}");
    assert!(!shown.contains("token-of-pets"), "{shown}");
}

#[tokio::test]
async fn a_document_of_a_url_is_kept_for_times_without_it() {
    let service = Service::start().await;
    let source = format!("{}/openapi", service.address);
    let mut app = service
        .setup()
        .agent("worker", &table(&source, "[\"listPets\"]"))
        .spawn()
        .await;
    // A document that comes late is fetched again.
    app.get_until("/agents/worker", |got| got.json()["valid"] == true)
        .await;
    assert_eq!(
        call_results(&app, &[("listPets", json!({}))]).await,
        ["found"]
    );
    for (status, text) in [
        (StatusCode::INTERNAL_SERVER_ERROR, ""),
        (StatusCode::FOUND, ""),
        (StatusCode::OK, "<html>not found</html>"),
    ] {
        service.set_document(status, text);
        app.restart().await;
        assert_eq!(
            call_results(&app, &[("listPets", json!({}))]).await,
            ["found"]
        );
    }
    // Without a copy the agent has an error.
    let other = format!("{source}?other");
    app.write_agent("other", &table(&other, "[\"listPets\"]"));
    service.set_document(StatusCode::FOUND, "");
    app.restart().await;
    let detail = app
        .post("/agents/other/runs", &json!({}))
        .await
        .problem(422);
    assert!(
        detail.contains("http_tools[0].openapi could not be fetched"),
        "{detail}"
    );
    assert!(
        detail.contains("a redirect, which is not followed"),
        "{detail}"
    );
}

#[tokio::test]
async fn sighup_fetches_what_has_failed() {
    let service = Service::start().await;
    let document = service.document();
    service.set_document(StatusCode::INTERNAL_SERVER_ERROR, "");
    let source = format!("{}/openapi", service.address);
    let app = TestApp::setup()
        .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]\n[agents]\nwatch = false")
        .environment("PETS_TOKEN", "token-of-pets")
        .agent("worker", &table(&source, "[\"listPets\"]"))
        .spawn()
        .await;
    let listed = app.get("/agents").await.json();
    assert_eq!(listed["data"][0]["valid"], false, "{listed}");

    service.set_document(StatusCode::OK, &document);
    app.daemon.signal("HUP");

    app.get_until("/agents/worker", |got| got.json()["valid"] == true)
        .await;
}

#[tokio::test]
async fn documents_of_several_agents_are_fetched_at_the_same_time() {
    let service = Service::start().await;
    // It responds to none before it has the requests of both agents.
    let both = Arc::new(Barrier::new(2));
    let text = service.document();
    let routes = Router::new().fallback(move || {
        let (both, text) = (Arc::clone(&both), text.clone());
        async move {
            both.wait().await;
            text
        }
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let mut server = JoinSet::new();
    server.spawn(async move { axum::serve(listener, routes).await.expect("serve") });
    let agent = |name: &str| {
        let base = format!("base_url = \"{}/v1\"\n", service.address);
        table(&format!("{address}/{name}"), "[\"listPets\"]") + &base
    };
    let app = service
        .setup()
        .agent("worker", &agent("first"))
        .agent("other", &agent("second"))
        .spawn()
        .await;
    assert_eq!(
        call_results(&app, &[("listPets", json!({}))]).await,
        ["found"]
    );
    let other = app.get("/agents/other").await.json();
    assert_eq!(other["error"], Value::Null, "{other}");
}

#[tokio::test]
async fn a_document_chooses_no_other_host() {
    let service = Service::start().await;
    let source = format!("{}/openapi", service.address);
    let elsewhere = PETS.replace("HOST", "https://10.0.0.1");
    service.set_document(StatusCode::OK, &elsewhere);
    let based = format!(
        "{}base_url = \"{}/v1\"\n",
        table(&source, "[\"listPets\"]"),
        service.address
    );
    let app = service
        .setup()
        .agent("worker", &based)
        .agent("other", &table(&source, "[\"listPets\"]"))
        .agent(
            "private",
            &table("https://10.0.0.1/openapi", "[\"listPets\"]"),
        )
        .spawn()
        .await;
    let detail = app
        .post("/agents/other/runs", &json!({}))
        .await
        .problem(422);
    let expected = "its server is https://10.0.0.1, which is not the host of the document; if that is right, set base_url";
    assert!(detail.contains(expected), "{detail}");
    let detail = app
        .post("/agents/private/runs", &json!({}))
        .await
        .problem(422);
    assert!(detail.contains("not a public address"), "{detail}");
    // The operator's base_url wins.
    assert_eq!(
        call_results(&app, &[("listPets", json!({}))]).await,
        ["found"]
    );
}

#[tokio::test]
async fn errors_in_operations_have_a_place() {
    let service = Service::start().await;
    let cases = [
        (
            table("pets.yaml", "[\"listPet\"]"),
            "names \"listPet\", but the document has no operation \"listPet\"; did you mean \"listPets\"?",
        ),
        (
            table("pets.yaml", "[\"fly\"]"),
            "it has: listPets, pets__create, GET /pets/{petId}",
        ),
        (table("pets.yaml", "[]"), "must name an operation"),
        (
            "[[http_tools]]\nopenapi = \"pets.yaml\"\n".to_owned(),
            "http_tools[0].operations is required",
        ),
        (
            table("none.yaml", "[\"a\"]"),
            "none.yaml, which does not exist",
        ),
        (table("a0.toml", "[\"a\"]"), "a0.toml, which "),
        (
            format!("{}name = \"x\"\n", table("pets.yaml", "[\"listPets\"]")),
            "unknown key",
        ),
        (
            format!("{}prefix = \"a__\"\n", table("pets.yaml", "[\"listPets\"]")),
            "set prefix",
        ),
    ];
    let mut setup = service.setup();
    for (at, (file, _)) in cases.iter().enumerate() {
        setup = setup.agent(&format!("a{at}"), file);
    }
    let app = setup.agent("worker", "").spawn().await;
    for (at, (file, expected)) in cases.iter().enumerate() {
        let answer = app.post(&format!("/agents/a{at}/runs"), &json!({})).await;
        let detail = answer.problem(422);
        assert!(detail.contains(expected), "{file}: {detail}");
    }
    // An agent keeps its definition while the document is broken.
    app.write_agent("worker", &table("pets.yaml", "[\"listPets\"]"));
    let is_shown = |text: &'static str| {
        let app = &app;
        within_timeout(text, async move {
            while !app.get("/agents/worker").await.text.contains(text) {
                tokio::task::yield_now().await;
            }
        })
    };
    is_shown("listPets").await;
    app.write("agents/pets.yaml", "openapi: 3.0.3\npaths: {}\n");
    is_shown("it has none").await;
    assert_eq!(
        call_results(&app, &[("listPets", json!({}))]).await,
        ["found"]
    );
}

fn document(paths: &Value, schemas: &Value) -> Document {
    let document = json!({"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}});
    Document::parse(&document.to_string()).expect("a document")
}

fn posts(schema: &Value) -> Value {
    let body = json!({"content": {"application/json": {"schema": schema}}});
    json!({"/a": {"post": {"operationId": "a", "requestBody": body}}})
}

#[test]
fn hostile_documents_are_bounded() {
    let reference = json!({"$ref": "#/components/schemas/s0"});
    let chain: serde_json::Map<String, Value> = (0..10_000)
        .map(|at| {
            (
                format!("s{at}"),
                json!({"$ref": format!("#/components/schemas/s{}", at + 1)}),
            )
        })
        .chain([("s10000".to_owned(), json!({}))])
        .collect();
    let chain = json!(chain);
    let deep = (0..70).fold(json!({}), |inner, _| json!({"not": inner}));
    let wide: Vec<Value> = (0..30_000).map(|_| json!({})).collect();
    let outside = json!({"$ref": "https://example.com/x.json#/Pet"});
    let missing = json!({"$ref": "#/components/schemas/none"});
    for (schema, schemas, expected) in [
        (&reference, &chain, "refer to over 300 others"),
        (&deep, &json!({}), "nested deeper than 64 levels"),
        (
            &json!({"anyOf": wide}),
            &json!({}),
            "have over 20000 values",
        ),
        (&outside, &json!({}), "is in another document"),
        (
            &missing,
            &json!({}),
            "the document has no \"#/components/schemas/none\"",
        ),
    ] {
        let document = document(&posts(schema), schemas);
        let error = axed::domain::openapi::operation(&document, "a", &[]).map(|_| ());
        let error = error.expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    // A cycle is finite.
    let pet = json!({"Pet": {"type": "object", "properties": {"parent": {"$ref": "#/components/schemas/Pet"}}}});
    let paths = posts(&json!({"$ref": "#/components/schemas/Pet"}));
    let read: Result<operation::Operation, String> =
        axed::domain::openapi::operation(&document(&paths, &pet), "a", &[]);
    assert_eq!(
        read.expect("an operation").parameters,
        json!({
            "type": "object", "properties": {"body": {"$ref": "#/$defs/Pet"}}, "required": [], "additionalProperties": false,
            "$defs": {"Pet": {"type": "object", "properties": {"parent": {"$ref": "#/$defs/Pet"}}}},
        })
    );
    let cycle = json!({"/a": {"$ref": "#/paths/~1a"}});
    let error = axed::domain::openapi::operation(&document(&cycle, &json!({})), "a", &[]);
    assert!(error.is_err_and(|it| it.contains("leads through over 16 others")));
    for (text, expected) in [
        ("{\"swagger\": \"2.0\"}", "Swagger 2.0"),
        ("openapi: 4.0.0", "is of OpenAPI 4.0.0"),
        ("<html>", "is no OpenAPI document"),
        ("{", "is no JSON"),
        ("a: [", "line "),
    ] {
        let error = Document::parse(text).map(|_| ()).expect_err(text);
        assert!(error.contains(expected), "{error}");
    }
}
