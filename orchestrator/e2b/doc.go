// Package e2b is the REST API that E2B's SDKs and command line speak, in both of their generations: it decodes and checks
// requests, and answers with E2B's JSON, codes and headers. What sandboxes are and do is the engine's; whose a key is, the
// database's. The package knows nothing of containers.
//
// A request is refused whole, with a line that names the field, if it asks for something that isn't known or isn't supported
// here: nothing is ignored. Keys and tokens are never logged.
package e2b
