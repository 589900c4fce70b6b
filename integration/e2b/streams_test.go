package e2b

import (
	"bufio"
	"context"
	"crypto/sha1"
	_ "embed"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// streamsPort is where streamsServer listens in a sandbox.
const streamsPort = 8000

//go:embed testdata/streams.py
var streamsServer string

// errGap says that what has come isn't what was next.
var errGap = errors.New("it isn't what was next")

// stream is one that is open into a sandbox.
type stream struct {
	kind  string
	came  atomic.Int64  // how much has, in whatever it is counted in
	ended chan struct{} // closed when it has
	err   error         // then
}

// open opens a stream of each kind.
func (c *client) open(sb sandbox) (all []*stream) {
	c.Helper()
	for kind, follow := range map[string]func(sandbox, *stream) error{"events": c.events, "download": c.download, "socket": c.socket} {
		st := &stream{kind: kind, ended: make(chan struct{})}
		go func() {
			defer close(st.ended)
			st.err = follow(sb, st)
		}()
		all = append(all, st)
	}
	return all
}

// get asks the server in a sandbox, until the test ends.
func (c *client) get(sb sandbox, path string, headers ...string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(c.Context(), "GET", "http://"+s.Config.Proxy.Listen.String()+path, nil)
	if err != nil {
		return nil, err
	}
	headers = append(headers, "E2b-Sandbox-Id", sb.ID, "E2b-Sandbox-Port", fmt.Sprint(streamsPort))
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return c.http.Do(req)
}

func (c *client) events(sb sandbox, st *stream) error {
	resp, err := c.get(sb, "/events")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		switch lines.Text() {
		case "":
		case fmt.Sprintf("data: %d", st.came.Load()):
			st.came.Add(1)
		default:
			return fmt.Errorf("%w: %q after %d", errGap, lines.Text(), st.came.Load())
		}
	}
	return lines.Err()
}

func (c *client) download(sb sandbox, st *stream) error {
	resp, err := c.get(sb, "/download")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	from, line := bufio.NewReader(resp.Body), make([]byte, 16)
	for {
		if _, err := io.ReadFull(from, line); err != nil {
			return err
		}
		if string(line) != fmt.Sprintf("%015d\n", st.came.Load()) {
			return fmt.Errorf("%w: %q after %d", errGap, line, st.came.Load())
		}
		st.came.Add(1)
	}
}

// socket sends a text by a WebSocket, when the one before has come back.
func (c *client) socket(sb sandbox, st *stream) error {
	const key = "dGhlIHNhbXBsZSBub25jZQ=="
	resp, err := c.get(sb, "/socket", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", key)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	conn, ok := resp.Body.(io.ReadWriter)
	if !ok || resp.Header.Get("Sec-WebSocket-Accept") != base64.StdEncoding.EncodeToString(sum[:]) {
		return fmt.Errorf("it is no WebSocket: %s", resp.Status)
	}
	for {
		text := fmt.Sprintf("text %d", st.came.Load())
		frame := []byte{0x81, 0x80 | byte(len(text)), 0, 0, 0, 0} // masked with nothing
		if _, err := conn.Write(append(frame, text...)); err != nil {
			return err
		}
		back := make([]byte, 2+len(text))
		if _, err := io.ReadFull(conn, back); err != nil {
			return err
		}
		if string(back[2:]) != text {
			return fmt.Errorf("%w: %q for %q", errGap, back, text)
		}
		st.came.Add(1)
		time.Sleep(50 * time.Millisecond) // what it is paced by
	}
}

// flow sees that all streams go on.
func (c *client) flow(when string, all []*stream) {
	c.Helper()
	for _, st := range all {
		had := st.came.Load()
		s.Eventually(c, time.Minute, st.kind+" that go on "+when, func() bool {
			select {
			case <-st.ended:
				c.Fatalf("%s have ended %s, after %d: %v", st.kind, when, st.came.Load(), st.err)
			default:
			}
			return st.came.Load() >= had+3
		})
	}
}

// cut sees that all streams end, with nothing but what was due.
func (c *client) cut(when string, all []*stream) {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), s.Config.Timeout(10*time.Second))
	defer cancel()
	for _, st := range all {
		select {
		case <-st.ended:
			if st.err == nil || errors.Is(st.err, errGap) || st.came.Load() == 0 {
				c.Errorf("%s, %s, after %d: %v", st.kind, when, st.came.Load(), st.err)
			}
		case <-ctx.Done():
			c.Fatalf("%s go on %s", st.kind, when)
		}
	}
}

// TestStreams: what is open into a sandbox goes on while the control plane is away and comes back, and while a snapshot is made;
// it ends when the machine is paused, rolled back or killed.
func TestStreams(t *testing.T) {
	before := footprint(t)
	c := newClient(t)
	sb := c.create(nil)
	at := "/sandboxes/" + sb.ID
	c.says(sb, "cat > /tmp/streams.py <<'END'\n"+streamsServer+"END\npython3 /tmp/streams.py > /dev/null 2>&1 && echo there", "there")

	all := c.open(sb)
	c.flow("at first", all)
	for _, v := range victims(true) {
		if v.name == "proxy" {
			continue // which they are open in
		}
		v.dies(t)
		c.flow("without "+v.name, all)
		v.returns(t)
		c.serves()
		c.flow("with "+v.name+" again", all)
	}
	var snap struct {
		ID string `json:"snapshotID"`
	}
	c.do("POST", at+"/snapshots", nil, &snap, 201)
	c.flow("after a snapshot", all)

	for _, cuts := range []struct {
		method, path string
		body         any
	}{
		{"POST", at + "/pause", nil},
		{"POST", at + "/rollback", map[string]any{"snapshotID": snap.ID}},
		{"DELETE", at, nil},
	} {
		c.do(cuts.method, cuts.path, cuts.body, nil, 204)
		c.cut("after "+cuts.method+" "+cuts.path, all)
		if cuts.method == "DELETE" {
			break
		}
		c.do("POST", "/v2"+at+"/connect", map[string]any{"timeout": 3600}, nil, map[bool]int{true: 201, false: 200}[strings.HasSuffix(cuts.path, "/pause")])
		all = c.open(sb)
		c.flow("opened after "+cuts.path, all)
	}
	if resp, err := c.get(sb, "/events"); err != nil || resp.StatusCode != 502 {
		t.Errorf("it is still reached: %v, %v", resp, err)
	} else {
		resp.Body.Close()
	}
	c.do("DELETE", "/templates/"+url.PathEscape(snap.ID), nil, nil, 204)
	asBefore(t, before)
}
