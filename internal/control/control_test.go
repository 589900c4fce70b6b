package control

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestAsk(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	if err := Ask(t.Context(), socket, http.MethodGet, "/x", nil, nil); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "cube up") {
		t.Errorf("without a socket: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /echo", func(w http.ResponseWriter, r *http.Request) { Answer(w, r.URL.Query()["say"], nil) })
	mux.HandleFunc("GET /no", func(w http.ResponseWriter, _ *http.Request) {
		Answer(w, nil, fmt.Errorf("there is no x: %w", errdefs.ErrNotFound))
	})
	mux.HandleFunc("POST /body", func(w http.ResponseWriter, r *http.Request) {
		var b struct{ Say string }
		err := Body(w, r, &b)
		Answer(w, b.Say, err)
	})
	mux.HandleFunc("GET /twice", func(w http.ResponseWriter, _ *http.Request) { Answer(w, nil, errdefs.ErrAlreadyExists) })
	srv := &http.Server{Handler: mux}
	go srv.Serve(l)
	defer srv.Close()
	var said []string
	if err := Ask(t.Context(), socket, http.MethodGet, "/echo", url.Values{"say": {"a b", "&"}}, &said); err != nil || strings.Join(said, "|") != "a b|&" {
		t.Errorf("%q, %v", said, err)
	}
	if err := Ask(t.Context(), socket, http.MethodGet, "/no", nil, &said); !errdefs.IsNotFound(err) || err.Error() != "there is no x: not found" {
		t.Errorf("what isn't there: %v", err)
	}
	if err := Ask(t.Context(), socket, http.MethodGet, "/echo", url.Values{"say": {"a"}}, new(int)); err == nil {
		t.Error("an answer of another kind must be an error")
	}
	var line string
	if err := Send(t.Context(), socket, http.MethodPost, "/body", map[string]string{"say": "x"}, &line); err != nil || line != "x" {
		t.Errorf("%q, %v", line, err)
	}
	for _, wrong := range []any{map[string]string{"says": "x"}, map[string]int{"say": 1}, []int{}, map[string]string{"say": strings.Repeat("x", bodyLimit)}} {
		if err := Send(t.Context(), socket, http.MethodPost, "/body", wrong, &line); !errdefs.IsInvalidArgument(err) {
			t.Errorf("a body that isn't one: %v", err)
		}
	}
	if resp, err := http.NewRequest(http.MethodPost, "/body", strings.NewReader(`{} {}`)); err != nil || !errdefs.IsInvalidArgument(Body(httptest.NewRecorder(), resp, &struct{}{})) {
		t.Error("two values are taken for one")
	}
	if err := Ask(t.Context(), socket, http.MethodGet, "/twice", nil, nil); !errdefs.IsConflict(err) {
		t.Errorf("what is there already: %v", err)
	}
	srv.Close()
	if err := Ask(t.Context(), socket, http.MethodGet, "/echo", nil, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("nobody listens: %v", err)
	}
}
