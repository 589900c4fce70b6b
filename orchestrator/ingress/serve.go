package ingress

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/cubesandbox/cube/internal/control"
)

// root is where the routes are on their socket.
const root = "/v1/routes"

// takeTimeout bounds how long a watcher may take for an update. One that doesn't take it begins anew, with the full state.
const takeTimeout = 10 * time.Second

// Handler answers on the route socket for the control plane. Who may connect may ask all: the socket is the data plane's alone.
func Handler(routes Routes) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+root+"/{id}", func(w http.ResponseWriter, r *http.Request) {
		route, err := routes.Lookup(r.Context(), r.PathValue("id"))
		control.Answer(w, route, err)
	})
	mux.HandleFunc("POST "+root+"/{id}/wake", func(w http.ResponseWriter, r *http.Request) {
		route, err := routes.Wake(r.Context(), r.PathValue("id"))
		control.Answer(w, route, err)
	})
	mux.HandleFunc("GET "+root, func(w http.ResponseWriter, r *http.Request) { watch(w, r, routes) })
	return mux
}

// watch writes an update a line until one of both sides ends.
func watch(w http.ResponseWriter, r *http.Request, routes Routes) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	rc := http.NewResponseController(w)
	enc := json.NewEncoder(w)
	err := routes.Watch(r.Context(), func(u Update) error {
		if err := rc.SetWriteDeadline(time.Now().Add(takeTimeout)); err != nil {
			return err
		}
		if err := enc.Encode(u); err != nil {
			return err
		}
		return rc.Flush()
	})
	if err != nil {
		panic(http.ErrAbortHandler) // a stream that has begun can't say why it ends
	}
}
