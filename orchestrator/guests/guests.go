// Package guests talks to what answers in sandboxes: envd, and the programs of templates' hooks. It is what package lifecycle
// has of HTTP. Nothing in a sandbox is trusted: answers are bounded, and of an error's text a line is taken.
package guests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
	"github.com/cubesandbox/cube/guest-agent/envd/processes"
	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

const (
	// Port is envd's, as SDKs expect it.
	Port = 49983
	// tokenHeader has envd's token, and hookHeader that of a hook.
	tokenHeader = "X-Access-Token"
	hookHeader  = "X-Cube-Hook-Token"
	// attempt bounds one request: a machine that has just been restored may lose the first packets.
	attempt = 3 * time.Second
	// hookAttempt is that of a hook, which may have something to do.
	hookAttempt = 10 * time.Second
	// startTimeout bounds how long a command takes to be there.
	startTimeout = 30 * time.Second
	// firstPause and lastPause are between attempts. Nothing tells when a guest begins to listen.
	firstPause, lastPause = 20 * time.Millisecond, 500 * time.Millisecond
	// maxAnswer bounds what is read of an answer.
	maxAnswer = 64 << 10
)

// Guests are those of this host.
type Guests struct {
	// Timeout scales deadlines for this host.
	Timeout func(time.Duration) time.Duration
	client  *http.Client
}

var _ lifecycle.Guests = (*Guests)(nil)

// New makes them. No connection is kept: the machine behind an address changes.
func New(timeout func(time.Duration) time.Duration) *Guests {
	return &Guests{Timeout: timeout, client: &http.Client{
		Transport: &http.Transport{
			DialContext:            (&net.Dialer{Timeout: timeout(attempt)}).DialContext,
			DisableKeepAlives:      true,
			MaxResponseHeaderBytes: maxAnswer,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

func url(addr netip.Addr, port int, path string) string {
	return "http://" + net.JoinHostPort(addr.String(), strconv.Itoa(port)) + path
}

// Init tells envd who the sandbox is, as often as it takes until it answers.
func (g *Guests) Init(ctx context.Context, addr netip.Addr, i lifecycle.Init) error {
	return g.insist(ctx, attempt, func(ctx context.Context) error {
		req, err := newInit(ctx, addr, i)
		if err == nil {
			_, err = g.do(req)
		}
		return err
	})
}

// newInit is the request that tells envd at this time who the sandbox is.
func newInit(ctx context.Context, addr netip.Addr, i lifecycle.Init) (*http.Request, error) {
	env := i.Env
	if env == nil {
		env = map[string]string{}
	}
	body := map[string]any{
		"accessToken": i.Token, "envVars": env, "sandboxID": i.SandboxID, "templateID": i.TemplateID, "lifecycleID": i.Request,
		"timestamp": time.Now().UTC().Format(time.RFC3339Nano),
	}
	if i.User != "" {
		body["defaultUser"] = i.User
	}
	body["defaultWorkdir"] = i.Workdir
	if i.HookToken != "" {
		body["hookToken"] = i.HookToken
	}
	header := http.Header{}
	if i.Former != "" {
		header.Set(tokenHeader, i.Former)
	}
	return newPost(ctx, url(addr, Port, "/init"), header, body)
}

// Hook tells the program of a template's hook, as often as it takes until it has agreed. That it has refused for good is
// errdefs.ErrInvalidArgument.
func (g *Guests) Hook(ctx context.Context, addr netip.Addr, h db.Hook, token string, b lifecycle.HookBody) error {
	header := http.Header{hookHeader: {token}, "Idempotency-Key": {b.RequestID}}
	return g.insist(ctx, hookAttempt, func(ctx context.Context) error {
		req, err := newPost(ctx, url(addr, h.Port, h.Path), header, b)
		if err == nil {
			_, err = g.do(req)
		}
		if r := (refusal{}); errors.As(err, &r) {
			return refusal{errdefs.ErrInvalidArgument.WithMessage(r.Error())}
		}
		return err
	})
}

// Start has envd start a command line of the default user's shell, which goes on. What it writes is in envd's log.
func (g *Guests) Start(ctx context.Context, addr netip.Addr, token, command string) error {
	// The end of the stream leaves the process. A deadline of the request would be the process's, so it has none.
	sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	defer time.AfterFunc(g.Timeout(startTimeout), cancel).Stop()
	tag := "start"
	events, err := g.run(sctx, addr, token, &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", command}}, Tag: &tag, Stdin: new(bool),
	}, processes.LogHeader)
	if err != nil {
		return err
	}
	defer events.Close()
	if !events.Receive() {
		return line(errors.Join(errors.New("it didn't start"), events.Err()))
	}
	return nil
}

// maxOutput bounds what Run keeps of a command's output.
const maxOutput = 16 << 10

// Run has envd run a command line of the default user's shell, and returns what it has written, its end if that is much, when it
// has ended. It is an error if it fails.
func (g *Guests) Run(ctx context.Context, addr netip.Addr, token, command string) (output string, err error) {
	events, err := g.run(ctx, addr, token, &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", command}}, Stdin: new(bool),
	})
	if err != nil {
		return "", err
	}
	defer events.Close()
	var kept []byte
	for events.Receive() {
		switch e := events.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Data_:
			kept = append(kept, e.Data.GetStdout()...)
			kept = append(kept, e.Data.GetStderr()...)
			kept = kept[max(0, len(kept)-maxOutput):]
		case *process.ProcessEvent_End_:
			if e.End.GetExitCode() != 0 {
				return string(kept), line(fmt.Errorf("%s: %s", e.End.GetStatus(), kept))
			}
			return string(kept), nil
		}
	}
	return string(kept), line(errors.Join(errors.New("it has no end"), events.Err()))
}

// run has envd start a process. flags are headers that are to be set.
func (g *Guests) run(ctx context.Context, addr netip.Addr, token string, r *process.StartRequest, flags ...string) (*connect.ServerStreamForClient[process.StartResponse], error) {
	client := process.NewProcessClient(g.client, url(addr, Port, ""), connect.WithReadMaxBytes(maxAnswer))
	req := connect.NewRequest(r)
	if token != "" {
		req.Header().Set(tokenHeader, token)
	}
	for _, name := range flags {
		req.Header().Set(name, "true")
	}
	events, err := client.Start(ctx, req)
	if err != nil {
		return nil, line(err)
	}
	return events, nil
}

// Exec has envd run a command line of the default user's shell to its end, and hands what it writes to out as it comes.
func (g *Guests) Exec(ctx context.Context, addr netip.Addr, token, command string, out func(lifecycle.Output)) (lifecycle.Exit, error) {
	// A deadline of the request would have envd kill the process, which would look as if it had ended.
	sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	events, err := g.run(sctx, addr, token, &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", command}}, Stdin: new(bool),
	})
	if err != nil {
		return lifecycle.Exit{}, err
	}
	defer events.Close()
	for events.Receive() {
		switch e := events.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Data_:
			if b := e.Data.GetStdout(); len(b) > 0 {
				out(lifecycle.Output{Bytes: b})
			}
			if b := e.Data.GetStderr(); len(b) > 0 {
				out(lifecycle.Output{Stderr: true, Bytes: b})
			}
		case *process.ProcessEvent_End_:
			return lifecycle.Exit{Code: int(e.End.GetExitCode()), Status: words(e.End.GetStatus())}, nil
		}
	}
	return lifecycle.Exit{}, line(errors.Join(errors.New("the command has no end: envd has gone"), events.Err()))
}

var versionForm = regexp.MustCompile(`^[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}$`)

// Version asks envd for the level of E2B's interface that it has.
func (g *Guests) Version(ctx context.Context, addr netip.Addr) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, g.Timeout(attempt))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url(addr, Port, "/health"), nil)
	if err != nil {
		return "", err
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return "", line(err)
	}
	defer resp.Body.Close()
	v := resp.Header.Get("X-Envd-Version")
	if !versionForm.MatchString(v) {
		return "", errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("envd's version is %.40q", v))
	}
	return v, nil
}

// Metrics asks envd what the sandbox uses.
func (g *Guests) Metrics(ctx context.Context, addr netip.Addr, token string) (lifecycle.Metric, error) {
	ctx, cancel := context.WithTimeout(ctx, g.Timeout(attempt))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url(addr, Port, "/metrics"), nil)
	if err != nil {
		return lifecycle.Metric{}, err
	}
	if token != "" {
		req.Header.Set(tokenHeader, token)
	}
	b, err := g.do(req)
	if err != nil {
		return lifecycle.Metric{}, err
	}
	var m struct {
		CPUs      int     `json:"cpu_count"`
		CPUUsed   float64 `json:"cpu_used_pct"`
		MemTotal  int64   `json:"mem_total"`
		MemUsed   int64   `json:"mem_used"`
		MemCache  int64   `json:"mem_cache"`
		DiskUsed  int64   `json:"disk_used"`
		DiskTotal int64   `json:"disk_total"`
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return lifecycle.Metric{}, line(fmt.Errorf("envd's metrics: %w", err))
	}
	return lifecycle.Metric{At: time.Now(), CPUs: m.CPUs, CPUUsedPercent: m.CPUUsed, MemUsed: m.MemUsed, MemTotal: m.MemTotal,
		MemCached: m.MemCache, DiskUsed: m.DiskUsed, DiskTotal: m.DiskTotal}, nil
}

// refusal is an answer that another attempt doesn't change.
type refusal struct{ error }

// insist repeats what takes at most limit until there is success or a refusal, or ctx ends.
func (g *Guests) insist(ctx context.Context, limit time.Duration, try func(ctx context.Context) error) error {
	pause := firstPause
	var before error
	for {
		tctx, cancel := context.WithTimeout(ctx, g.Timeout(limit))
		err := try(tctx)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil && before != nil { // it says nothing that was cut short
			err = before
		}
		before = err
		if r := (refusal{}); errors.As(err, &r) {
			return r.error
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("no success in time; the last attempt: %v", err))
		}
		pause = min(2*pause, lastPause)
	}
}

func newPost(ctx context.Context, to string, header http.Header, body any) (*http.Request, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, refusal{err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(b))
	if err != nil {
		return nil, refusal{err}
	}
	req.Header = header.Clone()
	req.Header.Set("Content-Type", "application/json")
	return req, nil
}

// again are the answers that another attempt may change, beside those of 5xx.
var again = []int{http.StatusNotFound, http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests}

// do returns what a successful answer has.
func (g *Guests) do(req *http.Request) ([]byte, error) {
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, line(err)
	}
	return success(resp)
}

// success returns what a successful answer has.
func success(resp *http.Response) ([]byte, error) {
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if resp.StatusCode/100 == 2 {
		return b, err
	}
	err = line(fmt.Errorf("it answers %d: %s", resp.StatusCode, b))
	if c := resp.StatusCode; c < 500 && !slices.Contains(again, c) {
		return nil, refusal{err}
	}
	return nil, err
}

// maxReason bounds what is told of a guest's words.
const maxReason = 300

// line makes one line of an error that may have a guest's words.
func line(err error) error { return errdefs.ErrUnavailable.WithMessage(words(err.Error())) }

// words are a guest's, in a line that does no harm.
func words(s string) string {
	text := strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.Join(strings.Fields(s), " "))
	if len(text) > maxReason {
		text = strings.ToValidUTF8(text[:maxReason], "") + "…"
	}
	return text
}
