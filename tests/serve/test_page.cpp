// The page in a real browser: a conversation, stop, a reload, a second tab, hostile text, phone and desktop, light and dark. With
// HEARTH_SCREENSHOTS=FOLDER in the environment pictures are left there, for people to look at.
#include <fstream>
#include <memory>

#include "browser.h"
#include "serve/server.h"
#include "serving.h"

namespace hearth::test {
namespace {

class Page : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::optional<std::string> program = find_chromium();
    if (!program) GTEST_SKIP() << "needs Chromium, which is absent";
    serving_ = std::make_unique<Serving>(serve::SchedulerOptions{.n_parallel = 4});
    serve::ServerOptions options{.chat_template = "chatml"};
    options.sampler.seed = 1;
    options.sampler.suppress = serving_->tokenizer().end_of_generation();  // only the context, or a client, ends a text
    server_ = std::make_unique<serve::Server>(serving_->scheduler(), serving_->tokenizer(),
                                              serve::ModelFacts{.id = "demo", .plan = {{"layers", {0.2, 0.5, 1.0}}}}, options);
    url_ = fmt::format("http://127.0.0.1:{}/", server_->bind("127.0.0.1", 0));
    server_->start();
    browser_ = std::make_unique<Browser>(*program);
    tab_ = std::make_unique<Tab>(*browser_, url_);
    tab_->show_as(1400, "light");  // where all fields can be reached
    ASSERT_TRUE(tab_->wait("document.readyState == 'complete' && document.querySelector('#figures dt')"));
  }
  // Whatever a test did: no script failed, nothing was refused, and nothing was asked of anybody else.
  void TearDown() override {
    if (!browser_) return;
    (void)tab_->eval("0");
    int requests = 0;
    for (const Json& e : browser_->events) {
      const std::string method = e.value("method", "");
      EXPECT_NE(method, "Runtime.exceptionThrown") << e;
      EXPECT_FALSE(method == "Log.entryAdded" && e["params"]["entry"]["level"] == "error") << e;
      if (method != "Network.requestWillBeSent") continue;
      const std::string url = e["params"]["request"]["url"];
      EXPECT_TRUE(url.starts_with(url_) || url.starts_with("data:") || url.starts_with("about:")) << url;
      ++requests;
    }
    EXPECT_GT(requests, 0);
  }

  // Asks as people do: with the keyboard.
  static void say(Tab& tab, const std::string& text) {
    tab.eval("document.getElementById('input').focus()");
    tab.type(text);
    tab.press("Enter", 13);
  }
  static void say_and_wait(Tab& tab, const std::string& text) {
    say(tab, text);
    ASSERT_TRUE(tab.wait("document.getElementById('send').textContent == 'Stop'"));
    ASSERT_TRUE(tab.wait("document.getElementById('send').textContent == 'Send'"));
  }
  static void set(Tab& tab, const std::string& field, const std::string& value) {
    tab.eval("document.getElementById('" + field + "').focus()");
    tab.type(value);
    tab.press("Tab", 9);
  }
  static std::string log_text(Tab& tab) { return tab.eval("document.getElementById('log').innerText"); }
  static std::string answers(Tab& tab) {
    return tab.eval("[...document.querySelectorAll('.message.assistant .body')].map(e => e.innerText).join('|')");
  }
  void picture(Tab& tab, const std::string& name) const {
    const char* folder = std::getenv("HEARTH_SCREENSHOTS");
    if (folder == nullptr) return;
    const std::string from = tab.screenshot_base64();
    std::string bytes;
    uint32_t bits = 0;
    int n = 0;
    const std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (const char c : from) {
      if (c == '=') break;
      bits = bits << 6 | static_cast<uint32_t>(digits.find(c));
      if ((n += 6) >= 8) bytes += static_cast<char>(bits >> (n -= 8) & 0xFF);
    }
    std::ofstream(std::filesystem::path(folder) / (name + ".png"), std::ios::binary) << bytes;
  }

  std::unique_ptr<Serving> serving_;
  std::unique_ptr<serve::Server> server_;
  std::string url_;
  std::unique_ptr<Browser> browser_;
  std::unique_ptr<Tab> tab_;
};

TEST_F(Page, AConversationStreamsAndAReloadKeepsIt) {
  Tab& tab = *tab_;
  set(tab, "max_tokens", "40"), set(tab, "temperature", "0");
  tab.eval(
      "window.states = new Set(), new MutationObserver(() => { const e = document.querySelector('.message.assistant .body');"
      "if (e) states.add(e.innerText); }).observe(document.getElementById('log'), {childList: true, subtree: true})");
  say_and_wait(tab, "Once upon a time");
  EXPECT_GE(tab.eval("states.size"), 3) << "the text grew";
  const std::string first = answers(tab);
  EXPECT_GT(first.size(), 40u);
  const std::string asked = tab.eval(
      "fetch('v1/chat/completions', {method: 'POST', body: JSON.stringify({max_tokens: 40, temperature: 0, messages: "
      "[{role: 'user', content: 'Once upon a time'}]})}).then(r => r.json()).then(r => r.choices[0].message.content)");
  EXPECT_EQ(tab.eval("JSON.parse(localStorage.getItem(Object.keys(localStorage).find(k => "
                     "k.startsWith('hearth.conversation')))).messages[1].content"),
            asked);
  say_and_wait(tab, "And then?");
  const std::string both = log_text(tab);
  EXPECT_NE(both.find("And then?"), std::string::npos);
  EXPECT_TRUE(tab.eval("document.getElementById('speed').textContent").get<std::string>().ends_with("tokens/s"));
  tab.call("Page.reload");
  ASSERT_TRUE(tab.wait("document.readyState == 'complete' && document.querySelectorAll('.message').length == 4"));
  EXPECT_EQ(log_text(tab), both);
  EXPECT_EQ(tab.eval("document.getElementById('max_tokens').value"), "40");

  // Edit takes a question back, with what came of it; again asks it anew.
  tab.eval("[...document.querySelectorAll('.message.user button')].filter(b => b.textContent == 'edit')[1].click()");
  EXPECT_EQ(tab.eval("document.getElementById('input').value"), "And then?");
  EXPECT_EQ(answers(tab), first);
  tab.eval("[...document.querySelectorAll('.message.assistant button')].find(b => b.textContent == 'again').click()");
  ASSERT_TRUE(tab.wait("document.getElementById('send').textContent == 'Send'"));
  EXPECT_EQ(answers(tab), first) << "the same, at temperature 0";
}

TEST_F(Page, StopEndsAnAnswerAndKeepsWhatThereIs) {
  Tab& tab = *tab_;
  for (const bool by_key : {false, true}) {
    tab.eval("document.getElementById('new').click()");
    say(tab, "Tell a story");
    ASSERT_TRUE(tab.wait("document.querySelector('.message.assistant .body')?.innerText.length > 10"));
    if (by_key) {
      tab.press("Escape", 27);
    } else {
      tab.eval("document.getElementById('send').click()");
    }
    ASSERT_TRUE(tab.wait("document.getElementById('send').textContent == 'Send'"));
    EXPECT_GT(answers(tab).size(), 10u);
    ASSERT_TRUE(serving_->settles());
  }
  EXPECT_LT(serving_->scheduler().stats().n_generated, 2 * 400) << "neither went on to the end of the context";
}

TEST_F(Page, ASecondTabSeesTheConversationsAndLosesNone) {
  Tab& tab = *tab_;
  set(tab, "max_tokens", "4");
  say_and_wait(tab, "In the first tab");
  Tab other(*browser_, url_);
  other.show_as(1400, "light");
  ASSERT_TRUE(other.wait("document.querySelectorAll('.message').length == 2"));
  EXPECT_EQ(log_text(other), log_text(tab));
  EXPECT_EQ(other.eval("document.getElementById('max_tokens').value"), "4");
  // One begins another conversation while the first one's answer comes.
  tab.bring_to_front();
  tab.eval("document.getElementById('max_tokens').value = ''");
  say(tab, "A long one");
  ASSERT_TRUE(tab.wait("document.getElementById('send').textContent == 'Stop'"));
  other.bring_to_front();
  other.eval("document.getElementById('new').click()");
  say_and_wait(other, "In the second tab");
  tab.bring_to_front();
  tab.press("Escape", 27);
  ASSERT_TRUE(tab.wait("document.getElementById('send').textContent == 'Send'"));
  ASSERT_TRUE(tab.wait("document.querySelectorAll('#list li').length == 2"));
  ASSERT_TRUE(other.wait("document.querySelectorAll('#list li').length == 2"));
  EXPECT_NE(log_text(tab).find("A long one"), std::string::npos) << "each tab stays where it was";
  EXPECT_NE(log_text(other).find("In the second tab"), std::string::npos);
  for (Tab* t : {&tab, &other}) {
    t->call("Page.reload");
    ASSERT_TRUE(t->wait("document.readyState == 'complete' && document.querySelectorAll('#list li').length == 2"));
  }
  EXPECT_NE(log_text(tab).find("A long one"), std::string::npos);
  EXPECT_NE(log_text(other).find("In the second tab"), std::string::npos);
  other.eval("document.querySelector('#list li.now button + button').click()");
  ASSERT_TRUE(tab.wait("document.querySelectorAll('#list li').length == 1"));
}

TEST_F(Page, HostileTextIsText) {
  Tab& tab = *tab_;
  const std::string hostile =
      "<img src=x onerror=\"hacked = 1\"><script>hacked = 2</script> **<svg onload=hacked=3>** `<b>code</b>` "
      "[here](javascript:hacked=4) [there](https://a.org/\"onclick=\"hacked=5)\n"
      "# <i>title</i>\n- <u>item</u>\n> <s>quote</s>\n```\n<script>hacked = 7</script>\n```";
  set(tab, "max_tokens", "2");
  say_and_wait(tab, "Hi");
  tab.eval("document.getElementById('input').value = " + Json(hostile).dump());
  tab.eval("document.getElementById('input').focus()"), tab.press("Enter", 13);
  ASSERT_TRUE(tab.wait("document.querySelectorAll('.message').length == 4 && document.getElementById('send').textContent == "
                       "'Send'"));
  // And as if the model had said it.
  tab.eval("(() => { const k = Object.keys(localStorage).find(k => k.startsWith('hearth.conversation')), c = "
           "JSON.parse(localStorage[k]); c.messages[3].content = " +
           Json(hostile).dump() + "; localStorage[k] = JSON.stringify(c); })()");
  tab.call("Page.reload");
  ASSERT_TRUE(tab.wait("document.readyState == 'complete' && document.querySelectorAll('.message').length == 4"));
  for (const char* kind : {"user", "assistant"}) {
    const std::string last = fmt::format("[...document.querySelectorAll('.message.{} .body')].at(-1)", kind);
    const std::string text = tab.eval(last + ".textContent");
    for (const char* part : {"<img src=x onerror=\"hacked = 1\"><script>hacked = 2</script>", "<svg onload=hacked=3>",
                             "<b>code</b>", "<i>title</i>", "<u>item</u>", "<s>quote</s>", "<script>hacked = 7</script>"}) {
      EXPECT_NE(text.find(part), std::string::npos) << kind << ": " << part;
    }
    EXPECT_EQ(tab.eval(last + ".querySelectorAll('img, script, svg, b, i, u, s, [onclick], [onerror], [onload]').length"), 0);
    EXPECT_EQ(tab.eval("[..." + last + ".querySelectorAll('a')].every(a => /^https?:/.test(a.href))"), true);
  }
  tab.eval("document.querySelectorAll('#log a').forEach(a => { a.removeAttribute('target'); a.onclick = e => "
           "e.preventDefault(); a.click(); })");
  EXPECT_EQ(tab.eval("typeof hacked"), "undefined");
  EXPECT_EQ(tab.eval("document.title"), "hearth");
  picture(tab, "hostile");
}

// Contrast as WCAG 2 measures it, of an element's text against the first background behind it.
constexpr const char* kContrast = R"((name => {
  const e = document.querySelector(name);
  const light = c => { const [r, g, b] = c.match(/[\d.]+/g).map(Number).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 :
    ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  let behind = e;
  while (/, 0\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const a = light(getComputedStyle(e).color), b = light(getComputedStyle(behind).backgroundColor);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}))";

TEST_F(Page, PhoneAndDesktopLightAndDark) {
  Tab& tab = *tab_;
  set(tab, "max_tokens", "30");
  say_and_wait(tab, "Tell a story about **a dog** and `code` " + std::string(300, 'w'));
  double backgrounds[2] = {};
  for (const int width : {390, 1400}) {
    for (const char* scheme : {"light", "dark"}) {
      SCOPED_TRACE(fmt::format("{} {}", width, scheme));
      tab.show_as(width, scheme);
      ASSERT_TRUE(tab.wait(fmt::format("innerWidth == {} && matchMedia('(prefers-color-scheme: {})').matches", width, scheme)));
      EXPECT_EQ(tab.eval("document.documentElement.scrollWidth"), width) << "nothing sticks out";
      const auto shown = [&](const char* name) {  // within the window
        return tab.eval(fmt::format("(r => r.width > 0 && r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight)"
                                    "(document.querySelector('{}').getBoundingClientRect())",
                                    name)) == true;
      };
      EXPECT_TRUE(shown("#input") && shown("#send"));
      for (const char* part : {"nav", "aside"}) EXPECT_EQ(shown(part), width == 1400) << part;
      EXPECT_EQ(shown("#show-nav"), width == 390);
      for (const char* text : {".message.user .body p", ".message .who", "#send", "header strong", ".message .tools button"}) {
        EXPECT_GE(tab.eval(fmt::format("{}('{}')", kContrast, text)).get<double>(), 4.5) << text;
      }
      backgrounds[*scheme == 'd'] = tab.eval("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])");
      picture(tab, fmt::format("{}-{}", width, scheme));
      if (width != 390) continue;
      for (const char* part : {"nav", "aside"}) {
        tab.eval(fmt::format("document.getElementById('show-{}').click()", part));
        EXPECT_TRUE(shown(part)) << part;
        picture(tab, fmt::format("{}-{}-{}", width, scheme, part));
        tab.eval(fmt::format("document.getElementById('show-{}').click()", part));
        EXPECT_FALSE(shown(part)) << part;
      }
    }
  }
  EXPECT_GT(backgrounds[0], 200);
  EXPECT_LT(backgrounds[1], 60);
  EXPECT_EQ(tab.eval("document.querySelectorAll('#plan i').length"), 3) << "the plan's layers";
}

}  // namespace
}  // namespace hearth::test
