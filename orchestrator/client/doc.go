// Package client is who uses sandboxes from elsewhere, with nothing but a key: it asks the E2B API for them and gets into them by
// the ingress proxy. It knows nothing of this machine's containers and needs no rights on it.
package client
