package e2b

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cube/guest-agent/envd/api/process"
)

// client is one who uses the API by a key of his own team.
type client struct {
	*testing.T
	key  string
	http *http.Client
	// limit bounds a command in a sandbox.
	limit time.Duration
	// request is what its requests are called, "" leaves that to the API.
	request string
}

// teams counts them.
var teams atomic.Int32

func newClient(t *testing.T) *client {
	t.Helper()
	r := s.Cube("key", "create", "--team", fmt.Sprintf("team-%d", teams.Add(1)))
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	return &client{T: t, key: strings.TrimSpace(r.Stdout), http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}, limit: time.Minute}
}

// dial connects as a program on the stack's host does.
func dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = s.Host.Do(func() error {
		var d net.Dialer
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// sandbox is what the API says of one.
type sandbox struct {
	ID    string `json:"sandboxID"`
	State string `json:"state"`
	Token string `json:"envdAccessToken"`
}

// answer is what the API says to a request.
type answer struct {
	code           int
	message, again string // of a refusal: why, and its Retry-After
}

// ask asks the API. The answer is decoded to into, unless that is nil.
func (c *client) ask(method, path string, body, into any) (a answer, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(2*time.Minute))
	defer cancel()
	var b []byte
	if body != nil {
		if b, err = json.Marshal(body); err != nil {
			return a, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.Config.API.Listen.String()+path, bytes.NewReader(b))
	if err != nil {
		return a, err
	}
	req.Header.Set("X-API-KEY", c.key)
	if c.request != "" {
		req.Header.Set("X-Request-Id", c.request)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	a = answer{code: resp.StatusCode, again: resp.Header.Get("Retry-After")}
	if a.code/100 == 2 && into != nil {
		return a, json.Unmarshal(text, into)
	}
	a.message = string(text)
	return a, nil
}

// call is ask for what says no more than a code and a message.
func (c *client) call(method, path string, body, into any) (code int, message string, err error) {
	a, err := c.ask(method, path, body, into)
	return a.code, a.message, err
}

// do is call for what has to answer with a code.
func (c *client) do(method, path string, body, into any, want int) {
	c.Helper()
	code, message, err := c.call(method, path, body, into)
	if err != nil || code != want {
		c.Fatalf("%s %s: %d %s, %v", method, path, code, message, err)
	}
}

func (c *client) create(body map[string]any) sandbox {
	c.Helper()
	if body == nil {
		body = map[string]any{}
	}
	if body["templateID"] == nil {
		body["templateID"] = "base"
	}
	if body["timeout"] == nil {
		body["timeout"] = 3600
	}
	var sb sandbox
	c.do("POST", "/v2/sandboxes", body, &sb, 201)
	return sb
}

// state is a sandbox's, "" for one that isn't there.
func (c *client) state(id string) string {
	c.Helper()
	var sb sandbox
	code, message, err := c.call("GET", "/sandboxes/"+id, nil, &sb)
	if err != nil || code != 200 && code != 404 {
		c.Fatalf("get %s: %d %s, %v", id, code, message, err)
	}
	return sb.State
}

// list is all of the team's, by id.
func (c *client) list() map[string]sandbox {
	c.Helper()
	var all []sandbox
	c.do("GET", "/v2/sandboxes", nil, &all, 200)
	byID := map[string]sandbox{}
	for _, sb := range all {
		byID[sb.ID] = sb
	}
	return byID
}

// run runs a command line in a sandbox, by the proxy, and returns what it writes.
func (c *client) run(sb sandbox, command string) (string, error) {
	return c.runAs(sb, "", nil, command)
}

// runAs is run by a user of the sandbox, "" for the default one, and with variables beside what the sandbox has.
func (c *client) runAs(sb sandbox, user string, env map[string]string, command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.Config.Timeout(c.limit))
	defer cancel()
	rpc := process.NewProcessClient(c.http, "http://"+s.Config.Proxy.Listen.String())
	req := connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-l", "-c", command}, Envs: env}, Stdin: new(bool)})
	routes(req.Header(), sb)
	if user != "" {
		req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
	events, err := rpc.Start(ctx, req)
	if err != nil {
		return "", err
	}
	defer events.Close()
	var out strings.Builder
	for events.Receive() {
		e := events.Msg().GetEvent()
		out.Write(e.GetData().GetStdout())
		out.Write(e.GetData().GetStderr())
		if end := e.GetEnd(); end != nil {
			if end.GetExitCode() != 0 {
				return out.String(), fmt.Errorf("%s: %s", end.GetStatus(), out.String())
			}
			return out.String(), nil
		}
	}
	return out.String(), fmt.Errorf("it has no end: %w", events.Err())
}

// routes has a request go to a sandbox's envd.
func routes(h http.Header, sb sandbox) {
	for k, v := range map[string]string{"E2b-Sandbox-Id": sb.ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": sb.Token} {
		h.Set(k, v)
	}
}

// says sees that a command in a sandbox writes that.
func (c *client) says(sb sandbox, command, want string) {
	c.Helper()
	if got, err := c.run(sb, command); err != nil || strings.TrimSpace(got) != want {
		c.Errorf("%s: %s writes %q, %v", sb.ID, command, got, err)
	}
}
