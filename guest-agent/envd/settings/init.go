package settings

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/auth"
	"github.com/cubesandbox/cube/guest-agent/envd/hosts"
	"github.com/cubesandbox/cube/guest-agent/envd/status"
)

// Limits of the clock's error that is left as it is: a clock that is behind breaks what it is compared with sooner than one
// that is ahead, and a request has been under way for a while.
const (
	maxBehind = 50 * time.Millisecond
	maxAhead  = 5 * time.Second
)

// maxBody bounds a request: some thousands of variables.
const maxBody = 4 << 20

// request is the body of /init. What isn't given stays as it is.
type request struct {
	EnvVars        *map[string]string `json:"envVars"` // replaces those before
	AccessToken    *string            `json:"accessToken"`
	Timestamp      *time.Time         `json:"timestamp"`
	DefaultUser    *string            `json:"defaultUser"`
	DefaultWorkdir *string            `json:"defaultWorkdir"`
	LifecycleID    *string            `json:"lifecycleID"`
	SandboxID      *string            `json:"sandboxID"`
	TemplateID     *string            `json:"templateID"`
	HookToken      *string            `json:"hookToken"`
}

// Init is POST /init. The first call sets the token; who calls later has it, in the header or in the body, and may give
// another one in the body. A request whose timestamp is older than one that was taken is late: it changes nothing, and is told
// so, as who sends it may be one whose clock was set back. The same request twice has one effect.
func (s *Store) Init(w http.ResponseWriter, r *http.Request) {
	var req request
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(&req); err != nil && !errors.Is(err, io.EOF) {
		status.WriteCode(w, http.StatusBadRequest, "the body of /init: "+strings.TrimPrefix(err.Error(), "json: "))
		return
	}
	n, err := s.take(req, r.Header.Get(auth.Header))
	if err != nil {
		status.Write(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
	_ = http.NewResponseController(w).Flush() // otherwise it is sent later
	slog.Info("initialised", "sandbox", n.SandboxID, "lifecycle", n.Lifecycle)
}

// take has the settings be as a request says, and returns them. Whoever makes a sandbox waits for it, in a machine that may be emulated:
// what was done by a request before isn't done again.
func (s *Store) take(req request, token string) (n Settings, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	if err := s.check(req); err != nil {
		return n, err
	}
	n = s.Get()
	if n.Token != "" && !auth.Equal(token, n.Token) && (req.AccessToken == nil || !auth.Equal(*req.AccessToken, n.Token)) {
		return n, errdefs.ErrUnauthenticated.WithMessage("neither the header nor the body has this sandbox's access token")
	}
	if req.Timestamp != nil {
		if late(*req.Timestamp, n.Stamp) {
			return n, errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("it is late: a request of %v was taken before this one of %v", n.Stamp, req.Timestamp))
		}
		n.Stamp = *req.Timestamp
	}
	if req.EnvVars != nil {
		n.Env = *req.EnvVars
	}
	give(&n.Token, req.AccessToken)
	give(&n.User, req.DefaultUser)
	give(&n.Workdir, req.DefaultWorkdir)
	give(&n.Lifecycle, req.LifecycleID)
	give(&n.SandboxID, req.SandboxID)
	give(&n.TemplateID, req.TemplateID)
	give(&n.HookToken, req.HookToken)
	if err := s.set(n); err != nil {
		return n, err
	}
	if req.DefaultUser != nil {
		s.found = n.User
	}
	s.nameHost()
	if req.Timestamp != nil {
		s.step(*req.Timestamp)
	}
	return n, nil
}

// late says whether a request was overtaken by the last one that was taken. If that one is of a time which hasn't come, the host's
// clock has been set back since, and it says nothing.
func late(request, last time.Time) bool {
	return request.Before(last) && last.Before(time.Now().Add(maxAhead))
}

func give(to, from *string) {
	if from != nil {
		*to = *from
	}
}

// check refuses what can't be. The caller has the turn.
func (s *Store) check(req request) error {
	if req.EnvVars != nil {
		for name, value := range *req.EnvVars {
			if err := CheckVariable(name, value); err != nil {
				return fmt.Errorf("envVars: %w", err)
			}
		}
	}
	if req.DefaultUser != nil && (*req.DefaultUser != s.found || s.found == "") {
		if _, err := s.Users.Lookup(*req.DefaultUser); err != nil {
			return errdefs.ErrInvalidArgument.WithMessage("defaultUser: " + err.Error())
		}
	}
	for name, v := range map[string]*string{"defaultWorkdir": req.DefaultWorkdir, "sandboxID": req.SandboxID, "templateID": req.TemplateID} {
		if v != nil && strings.ContainsRune(*v, 0) {
			return errdefs.ErrInvalidArgument.WithMessage(name + " has a zero byte")
		}
	}
	return nil
}

// CheckVariable says whether a process's environment can have the variable. The error is errdefs.ErrInvalidArgument.
func CheckVariable(name, value string) error {
	if name == "" || strings.ContainsAny(name, "=\x00") {
		return errdefs.ErrInvalidArgument.WithMessage(strconv.Quote(name) + " is no name of a variable")
	}
	if strings.ContainsRune(value, 0) {
		return errdefs.ErrInvalidArgument.WithMessage("the value of " + name + " has a zero byte")
	}
	return nil
}

// nameHost has the machine's name found in it. Without that lookups of it are slow, and nothing else. The caller has the turn.
func (s *Store) nameHost() {
	if s.Hosts == "" {
		return
	}
	name, err := os.Hostname()
	if err == nil && name == s.host {
		return
	}
	if err == nil {
		err = hosts.Name(s.Hosts, name)
	}
	if err != nil {
		slog.Warn("the machine's own name isn't among its hosts", "error", err)
		return
	}
	s.host = name
}

// step sets the clock where it is wrong by too much. A clock that can't be set keeps nobody from working.
func (s *Store) step(to time.Time) {
	ahead := time.Since(to)
	if s.SetClock == nil || (ahead <= maxAhead && ahead >= -maxBehind) {
		return
	}
	if err := s.SetClock(to); err != nil {
		slog.Warn("the clock is wrong and can't be set", "ahead", ahead.String(), "error", err)
	}
}
