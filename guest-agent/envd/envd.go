// Package envd is E2B's daemon of a sandbox: what the SDKs call to run commands and reach files. It serves over HTTP/1.1,
// and h2 without TLS, on one port. What is here puts the parts together; each part is a package of its own.
package envd

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cube/guest-agent/envd/accept"
	filesystempb "github.com/cubesandbox/cube/guest-agent/envd/api/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/guest-agent/envd/cgroups"
	"github.com/cubesandbox/cube/guest-agent/envd/files"
	"github.com/cubesandbox/cube/guest-agent/envd/filesystem"
	"github.com/cubesandbox/cube/guest-agent/envd/hosts"
	"github.com/cubesandbox/cube/guest-agent/envd/metrics"
	"github.com/cubesandbox/cube/guest-agent/envd/owned"
	"github.com/cubesandbox/cube/guest-agent/envd/ports"
	"github.com/cubesandbox/cube/guest-agent/envd/processes"
	"github.com/cubesandbox/cube/guest-agent/envd/settings"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
	"github.com/cubesandbox/cube/guest-agent/envd/users"
)

// Version is the level of E2B's interface that this is, which SDKs and control planes ask for.
const Version = "0.6.13"

// Port is where SDKs expect it.
const Port = 49983

// Limits of connections. What transfers data has no limit in time.
const (
	maxConnections = 4096
	maxHeader      = 64 << 10
	headerTimeout  = 30 * time.Second
	// idleTimeout is longer than that of the proxies before it, so that none of them sends a request into a connection
	// that is being closed.
	idleTimeout = 15 * time.Minute
	// maxMessage bounds a message of a service, of which all is in memory: a piece of a command's input.
	maxMessage = 64 << 20
)

// Config is what the daemon is for.
type Config struct {
	// Address is what it listens on, as ":49983".
	Address string
	// User and Workdir are the defaults until /init gives others.
	User, Workdir string
	// Sandbox is set where all of the machine is a sandbox's, as under this package's init: the daemon sets the clock,
	// hands its own environment on, puts commands into the init's control groups, and keeps its settings for a daemon after
	// it. Otherwise, it is one program among a machine's others.
	Sandbox bool
}

// Dir has the facts that a sandbox's programs find, and the daemon's settings.
const Dir = "/run/e2b"

// Run serves until ctx ends.
func Run(ctx context.Context, c Config) error {
	handler, err := newHandler(c)
	if err != nil {
		return err
	}
	listener, err := accept.Listen(ctx, c.Address, maxConnections)
	if err != nil {
		return err
	}
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug), Protocols: new(http.Protocols),
	}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if c.Sandbox {
		go (&ports.Forwarder{Device: "eth0", Except: Port}).Run(ctx)
	}
	slog.Info("envd serves", "address", listener.Addr().String(), "version", Version)
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func newHandler(c Config) (http.Handler, error) {
	store := &settings.Store{Users: users.System}
	registry := &processes.Registry{Settings: store, Environ: []string{"PATH=" + os.Getenv("PATH")}, Log: slog.Default()}
	var journal owned.Journal
	if c.Sandbox {
		journal.Dir = filepath.Join(Dir, ".uploads")
		if clean, err := journal.Open(); err != nil {
			slog.Warn("an upload would be left if this daemon were killed amid it", "error", err)
			journal.Dir = ""
		} else {
			go clean()
		}
		store.Dir, store.SetClock, store.Hosts = Dir, setClock, hosts.File
		registry.Environ = os.Environ()
		openGroups(registry)
	}
	if err := store.Load(settings.Settings{User: c.User, Workdir: c.Workdir}); err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("GET /envs", func(w http.ResponseWriter, _ *http.Request) {
		status.WriteJSON(w, http.StatusOK, store.Get().Environ())
	})
	mux.HandleFunc("POST /init", store.Init)
	mux.Handle("GET /metrics", metrics.New())
	(&files.Handler{Settings: store, Journal: journal}).Register(mux)
	options := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage)}
	mux.Handle(filesystempb.NewFilesystemHandler(&filesystem.Service{Settings: store}, options...))
	mux.Handle(process.NewProcessHandler(&processes.Service{Registry: registry}, options...))
	return withVersion(cors(noZeroTimeout(auth.Guard(store.Token, mux)))), nil
}

// openGroups has commands run in the control groups that the init has made, if it could.
func openGroups(r *processes.Registry) {
	var errs [2]error
	r.Commands, errs[0] = cgroups.Open(cgroups.Root, cgroups.Commands)
	r.Terminals, errs[1] = cgroups.Open(cgroups.Root, cgroups.Terminal)
	if err := errors.Join(errs[:]...); err != nil {
		slog.Warn("commands share envd's control group", "error", err)
	}
}

func withVersion(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Envd-Version", Version)
		next.ServeHTTP(w, r)
	})
}

// noZeroTimeout takes a timeout of 0 for what clients mean by it, none.
func noZeroTimeout(next http.Handler) http.Handler {
	const name = "Connect-Timeout-Ms"
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n, err := strconv.ParseUint(r.Header.Get(name), 10, 64); err == nil && n == 0 {
			r.Header.Del(name)
		}
		next.ServeHTTP(w, r)
	})
}
